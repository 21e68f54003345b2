package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// How often one knocks.
const every = 4 * time.Millisecond

// How long one connection may take.
const patience = 10 * time.Second

// What came of knocking so far.
type knocked struct {
	// Connections, each with its TLS handshake.
	Made int `json:"made"`
	// Attempts that failed, and the last reason.
	Failed int    `json:"failed"`
	Why    string `json:"why"`
	// The longest that a connection took, with all attempts that it needed, in milliseconds.
	LongestMs float64 `json:"longestMs"`
}

// knock makes one connection after another, and says on HTTP what came of it.
func knock(address, ca, serve string) error {
	pem, err := os.ReadFile(ca)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return fmt.Errorf("%s: no certificate", ca)
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	config := &tls.Config{RootCAs: roots, ServerName: host}
	var lock sync.Mutex
	var seen knocked
	go func() {
		for {
			begun, failed, why := time.Now(), 0, ""
			for {
				if err = once(address, config); err == nil {
					break
				}
				failed, why = failed+1, err.Error()
				log.Print(why)
				time.Sleep(every)
			}
			took := float64(time.Since(begun).Microseconds()) / 1000
			lock.Lock()
			seen.Made++
			seen.Failed += failed
			if failed > 0 {
				seen.Why = why
			}
			seen.LongestMs = max(seen.LongestMs, took)
			lock.Unlock()
			time.Sleep(every)
		}
	}()
	return http.ListenAndServe(serve, http.HandlerFunc(func(out http.ResponseWriter, _ *http.Request) {
		lock.Lock()
		defer lock.Unlock()
		_ = json.NewEncoder(out).Encode(seen)
	}))
}

func once(address string, config *tls.Config) error {
	stream, err := net.DialTimeout("tcp", address, patience)
	if err != nil {
		return err
	}
	defer stream.Close()
	if err := stream.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	return tls.Client(stream, config).Handshake()
}
