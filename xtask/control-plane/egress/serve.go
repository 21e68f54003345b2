package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	testing "google.golang.org/grpc/interop/grpc_testing"
)

// serve runs all servers at an address, and says in a line that they listen.
func serve(address, certificate, key string) {
	pair, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		log.Fatal(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{pair}}
	var listeners []net.Listener
	for _, port := range []string{clearPort, tlsPort, grpcPort, grpcTLSPort} {
		listener, err := net.Listen("tcp", net.JoinHostPort(address, port))
		if err != nil {
			log.Fatal(err)
		}
		listeners = append(listeners, listener)
	}
	web := &http.Server{Handler: handler(), Protocols: new(http.Protocols), TLSConfig: config}
	web.Protocols.SetHTTP1(true)
	web.Protocols.SetHTTP2(true)
	web.Protocols.SetUnencryptedHTTP2(true)
	// A client that the rules refuse leaves nothing to log.
	web.ErrorLog = log.New(io.Discard, "", 0)
	go func() { log.Fatal(web.Serve(listeners[0])) }()
	go func() { log.Fatal(web.ServeTLS(listeners[1], "", "")) }()
	inClear, secure := grpc.NewServer(), grpc.NewServer(grpc.Creds(credentials.NewTLS(config)))
	for at, server := range []*grpc.Server{inClear, secure} {
		testing.RegisterTestServiceServer(server, service{})
		go func() { log.Fatal(server.Serve(listeners[2+at])) }()
	}
	fmt.Println("listening")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		log.Fatal(err)
	}
}

// handler repeats the body of a request; `/together` answers once as many requests wait as they say.
func handler() http.Handler {
	var crowd crowd
	mux := http.NewServeMux()
	mux.HandleFunc("/echo", func(response http.ResponseWriter, request *http.Request) {
		body, err := io.ReadAll(request.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		response.Header().Set("X-Protocol", request.Proto)
		// A client that is gone needs no answer.
		_, _ = response.Write(body)
	})
	mux.HandleFunc("/together", func(response http.ResponseWriter, request *http.Request) {
		count, err := strconv.Atoi(request.URL.Query().Get("count"))
		if err != nil {
			http.Error(response, err.Error(), http.StatusBadRequest)
			return
		}
		select {
		case <-crowd.joined(count):
		case <-request.Context().Done():
		}
	})
	return mux
}

// crowd is how many requests have come to wait for each other.
type crowd struct {
	mutex    sync.Mutex
	waiting  int
	complete chan struct{}
}

// joined gives a channel that is closed when `count` requests have come.
func (c *crowd) joined(count int) <-chan struct{} {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.complete == nil {
		c.complete = make(chan struct{})
	}
	if c.waiting++; c.waiting == count {
		close(c.complete)
	}
	return c.complete
}

// service repeats payloads.
type service struct {
	testing.UnimplementedTestServiceServer
}

func (service) UnaryCall(_ context.Context, request *testing.SimpleRequest) (*testing.SimpleResponse, error) {
	return &testing.SimpleResponse{Payload: request.Payload}, nil
}

func (service) FullDuplexCall(stream testing.TestService_FullDuplexCallServer) error {
	for {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := stream.Send(&testing.StreamingOutputCallResponse{Payload: request.Payload}); err != nil {
			return err
		}
	}
}
