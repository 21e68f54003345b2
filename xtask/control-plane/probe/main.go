// What the tests of the node bed run in a pod: an image has nothing but this program.
//
//	probe serve [ADDRESS]      answers every request with the name of the pod
//	probe get URL [CA TOKEN]   prints what a server answers, fails unless that is 200
//	probe through PROXY URL [CA TOKEN]
//	                           does the same through a forward proxy
//	probe cat FILE             prints a file
//	probe dns ADDRESS          answers as the DNS server of a cluster does
//	probe review ADDRESS DIR   answers admission reviews over TLS: it refuses, and says which pod does so
//	probe knock ADDRESS CA     makes one TLS connection after another, and answers at :8080 what came of it
package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	log.SetFlags(0)
	if err := run(os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

func run(arguments []string) error {
	switch {
	case len(arguments) >= 1 && arguments[0] == "serve":
		return serve(append(arguments, ":8080")[1])
	case len(arguments) == 2 && arguments[0] == "get":
		return get(http.DefaultTransport, arguments[1], "")
	case len(arguments) == 4 && arguments[0] == "get":
		return getTrusting(&http.Transport{}, arguments[1], arguments[2], arguments[3])
	case len(arguments) >= 3 && arguments[0] == "through":
		return through(arguments[1], arguments[2:])
	case len(arguments) == 2 && arguments[0] == "cat":
		return cat(arguments[1])
	case len(arguments) == 2 && arguments[0] == "dns":
		return dns(arguments[1])
	case len(arguments) == 3 && arguments[0] == "review":
		return review(arguments[1], arguments[2])
	case len(arguments) == 3 && arguments[0] == "knock":
		return knock(arguments[1], arguments[2], ":8080")
	default:
		return errors.New("usage: probe serve [ADDRESS] | get URL [CA TOKEN] | through PROXY URL [CA TOKEN] | cat FILE | dns ADDRESS | review ADDRESS DIR | knock ADDRESS CA")
	}
}

func serve(address string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	failed := make(chan error, 1)
	go func() {
		failed <- http.ListenAndServe(address, http.HandlerFunc(func(out http.ResponseWriter, request *http.Request) {
			log.Printf("%s %s from %s", request.Method, request.URL, request.RemoteAddr)
			fmt.Fprintln(out, name)
		}))
	}()
	log.Printf("%s serves %s", name, address)
	select {
	case err := <-failed:
		return err
	case <-ended:
		log.Print("told to end")
		return nil
	}
}

func through(proxy string, arguments []string) error {
	at, err := url.Parse(proxy)
	if err != nil {
		return err
	}
	transport := &http.Transport{Proxy: http.ProxyURL(at)}
	if len(arguments) == 3 {
		return getTrusting(transport, arguments[0], arguments[1], arguments[2])
	}
	return get(transport, arguments[0], "")
}

func getTrusting(transport *http.Transport, url, ca, token string) error {
	pem, err := os.ReadFile(ca)
	if err != nil {
		return err
	}
	bearer, err := os.ReadFile(token)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return fmt.Errorf("%s: no certificate", ca)
	}
	transport.TLSClientConfig = &tls.Config{RootCAs: roots}
	return get(transport, url, strings.TrimSpace(string(bearer)))
}

func get(transport http.RoundTripper, url, token string) error {
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if _, err := io.Copy(os.Stdout, answer.Body); err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, answer.Status)
	}
	return nil
}

func cat(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = io.Copy(os.Stdout, file)
	return err
}
