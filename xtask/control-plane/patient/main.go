// A client-go client that creates ConfigMaps, one after the other, and waits where it is told to come again later.
//
// It prints one line of JSON: how many it made, and the error that ended it.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

type result struct {
	Created int    `json:"created"`
	Error   string `json:"error"`
}

func main() {
	config := &rest.Config{QPS: -1}
	flag.StringVar(&config.Host, "server", "", "URL of the API server, or of a proxy before it")
	flag.StringVar(&config.TLSClientConfig.CAFile, "ca", "", "file with the CA to believe")
	flag.StringVar(&config.BearerToken, "token", "", "bearer token")
	flag.StringVar(&config.ContentType, "content-type", runtime.ContentTypeProtobuf, "what to send")
	namespace := flag.String("namespace", "", "where the ConfigMaps are made")
	count := flag.Int("count", 1, "how many are made")
	http1 := flag.Bool("http1", false, "speak HTTP/1.1")
	flag.Parse()
	if *http1 {
		config.TLSClientConfig.NextProtos = []string{"http/1.1"}
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Fatal(err)
	}
	var made result
	for made.Created < *count {
		object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("patient-%d", made.Created)}}
		_, err := client.CoreV1().ConfigMaps(*namespace).Create(context.Background(), object, metav1.CreateOptions{})
		if err != nil {
			made.Error = err.Error()
			break
		}
		made.Created++
	}
	if err := json.NewEncoder(os.Stdout).Encode(made); err != nil {
		log.Fatal(err)
	}
}
