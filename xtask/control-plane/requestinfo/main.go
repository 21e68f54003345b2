// Reads lines `METHOD TARGET` and prints what the API server's own code makes of each, one JSON object a line, in the
// form of `ctrlmesh classify`.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"net/http"
	"os"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
)

type info struct {
	ResourceRequest bool   `json:"resourceRequest"`
	Path            string `json:"path"`
	Verb            string `json:"verb"`
	APIPrefix       string `json:"apiPrefix"`
	APIGroup        string `json:"apiGroup"`
	APIVersion      string `json:"apiVersion"`
	Namespace       string `json:"namespace"`
	Resource        string `json:"resource"`
	Subresource     string `json:"subresource"`
	Name            string `json:"name"`
	FieldSelector   string `json:"fieldSelector"`
	LabelSelector   string `json:"labelSelector"`
}

// classify gives what the server makes of a request line, or nil where it refuses it.
func classify(factory *request.RequestInfoFactory, line []byte) *info {
	raw := append(append([]byte{}, line...), " HTTP/1.1\r\nHost: server\r\n\r\n"...)
	parsed, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(raw)))
	if err != nil {
		return nil
	}
	found, err := factory.NewRequestInfo(parsed)
	if err != nil {
		return nil
	}
	return &info{
		found.IsResourceRequest, found.Path, found.Verb, found.APIPrefix, found.APIGroup, found.APIVersion,
		found.Namespace, found.Resource, found.Subresource, found.Name, found.FieldSelector, found.LabelSelector,
	}
}

func main() {
	flags := flag.NewFlagSet("klog", flag.ExitOnError)
	klog.InitFlags(flags)
	if err := flags.Parse([]string{"-logtostderr=false", "-alsologtostderr=false", "-stderrthreshold=FATAL"}); err != nil {
		panic(err)
	}
	klog.SetOutput(io.Discard)
	factory := &request.RequestInfoFactory{
		APIPrefixes:          sets.NewString("api", "apis"),
		GrouplessAPIPrefixes: sets.NewString("api"),
	}
	out := bufio.NewWriter(os.Stdout)
	encoder := json.NewEncoder(out)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var answer any = map[string]bool{"error": true}
		if found := classify(factory, lines.Bytes()); found != nil {
			answer = found
		}
		if err := encoder.Encode(answer); err != nil {
			panic(err)
		}
	}
	if err := lines.Err(); err != nil {
		panic(err)
	}
	if err := out.Flush(); err != nil {
		panic(err)
	}
}
