package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	testing "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
)

// Requests of a client, over one connection.
const requests = 3

// Messages of a stream.
const messages = 100

// A body that takes many reads, and more than HTTP/2's first windows.
const bodyBytes = 1 << 20

// clients dial the servers' address, whatever host they name.
type clients struct {
	address string
	roots   *x509.CertPool
}

// way is how a client of net/http speaks.
type way struct {
	name  string
	http2 bool
	// 0: in the clear.
	tls uint16
}

var ways = []way{
	{"HTTP/1.1", false, 0},
	{"h2c", true, 0},
	{"TLS 1.2, HTTP/1.1", false, tls.VersionTLS12},
	{"TLS 1.2, h2", true, tls.VersionTLS12},
	{"TLS 1.3, HTTP/1.1", false, tls.VersionTLS13},
	{"TLS 1.3, h2", true, tls.VersionTLS13},
}

// ask lets each client speak with the allowed and the refused host.
func (c clients) ask() map[string]string {
	seen := make(map[string]string)
	for _, host := range []string{allowed, refused} {
		for _, way := range ways {
			seen[way.name+" to "+host] = c.web(way, host)
		}
		for name, call := range map[string]func(testing.TestServiceClient) string{"unary": unary, "stream": stream} {
			seen["gRPC, "+name+" to "+host] = c.call(host, grpcPort, insecure.NewCredentials(), call)
			secure := credentials.NewTLS(&tls.Config{RootCAs: c.roots})
			seen["gRPC, TLS, "+name+" to "+host] = c.call(host, grpcTLSPort, secure, call)
		}
	}
	return seen
}

// together has `count` requests at once, each with a connection of its own, half of them over TLS: how often each
// outcome was seen. No request is answered before all have come.
func (c clients) together(count int) map[string]string {
	inClear, secure := c.transport(ways[0]), c.transport(ways[4])
	var group sync.WaitGroup
	var mutex sync.Mutex
	outcomes := make(map[string]int)
	for at := range count {
		transport, url := inClear, "http://"+net.JoinHostPort(allowed, clearPort)
		if at%2 == 1 {
			transport, url = secure, "https://"+net.JoinHostPort(allowed, tlsPort)
		}
		group.Go(func() {
			client := http.Client{Transport: transport, Timeout: patience}
			response, err := client.Get(fmt.Sprintf("%s/together?count=%d", url, count))
			outcome := ""
			if err != nil {
				outcome = fault(err)
			} else {
				response.Body.Close()
				outcome = response.Status
			}
			mutex.Lock()
			defer mutex.Unlock()
			outcomes[outcome]++
		})
	}
	group.Wait()
	seen := make(map[string]string)
	for outcome, times := range outcomes {
		seen[outcome] = fmt.Sprint(times)
	}
	return seen
}

// transport dials the servers' address; with TLS, it verifies the certificate by the host of the URL.
func (c clients) transport(way way) *http.Transport {
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetHTTP1(!way.http2)
	transport.Protocols.SetHTTP2(way.http2 && way.tls != 0)
	transport.Protocols.SetUnencryptedHTTP2(way.http2 && way.tls == 0)
	transport.TLSClientConfig = &tls.Config{RootCAs: c.roots, MinVersion: way.tls, MaxVersion: way.tls}
	transport.DialContext = func(ctx context.Context, _, target string) (net.Conn, error) {
		return c.dial(ctx, target)
	}
	return transport
}

func (c clients) dial(ctx context.Context, target string) (net.Conn, error) {
	_, port, err := net.SplitHostPort(target)
	if err != nil {
		return nil, err
	}
	return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(c.address, port))
}

// web is what a client of net/http sees of its requests: the last status, and how many connections there were.
func (c clients) web(way way, host string) string {
	transport := c.transport(way)
	defer transport.CloseIdleConnections()
	url := "http://" + net.JoinHostPort(host, clearPort) + "/echo"
	if way.tls != 0 {
		url = "https://" + net.JoinHostPort(host, tlsPort) + "/echo"
	}
	connections, outcome := 0, ""
	for at := range requests {
		sent := bytes.Repeat([]byte{byte('a' + at)}, bodyBytes)
		if host == refused {
			// The proxy answers before it reads a body, and a client may see its own error first.
			sent = nil
		}
		request, err := http.NewRequest(http.MethodPost, url, bytes.NewReader(sent))
		if err != nil {
			return err.Error()
		}
		trace := &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) {
			if !got.Reused {
				connections++
			}
		}}
		client := http.Client{Transport: transport, Timeout: patience}
		response, err := client.Do(request.WithContext(httptrace.WithClientTrace(request.Context(), trace)))
		if err != nil {
			return fault(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			return fault(err)
		}
		if response.StatusCode == http.StatusOK && !bytes.Equal(body, sent) {
			return fmt.Sprintf("%d other bytes came back", len(body))
		}
		outcome = describe(response)
	}
	return fmt.Sprintf("%s, connections: %d", outcome, connections)
}

// describe says the status, and the protocols that client and server saw, or the rule that refused.
func describe(response *http.Response) string {
	parts := []string{fmt.Sprint(response.StatusCode), response.Proto}
	if response.TLS != nil {
		parts = append(parts, tls.VersionName(response.TLS.Version))
	}
	for _, name := range []string{"X-Protocol", "X-Ctrlmesh-Rule"} {
		if value := response.Header.Get(name); value != "" {
			parts = append(parts, value)
		}
	}
	return strings.Join(parts, " ")
}

// fault names errors that tests expect.
func fault(err error) string {
	if errors.Is(err, io.EOF) {
		return "EOF"
	}
	return err.Error()
}

// call is what a client of gRPC sees.
func (c clients) call(
	host, port string, secure credentials.TransportCredentials, call func(testing.TestServiceClient) string,
) string {
	options := []grpc.DialOption{grpc.WithTransportCredentials(secure), grpc.WithContextDialer(c.dial)}
	connection, err := grpc.NewClient("passthrough:///"+net.JoinHostPort(host, port), options...)
	if err != nil {
		return err.Error()
	}
	defer connection.Close()
	return call(testing.NewTestServiceClient(connection))
}

func unary(client testing.TestServiceClient) string {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for at := range requests {
		sent := &testing.Payload{Body: bytes.Repeat([]byte{byte('a' + at)}, bodyBytes)}
		response, err := client.UnaryCall(ctx, &testing.SimpleRequest{Payload: sent})
		if err != nil {
			return code(err)
		}
		if !bytes.Equal(response.Payload.Body, sent.Body) {
			return "other bytes came back"
		}
	}
	return "OK"
}

// stream sends a message once the answer to the one before is there.
func stream(client testing.TestServiceClient) string {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	stream, err := client.FullDuplexCall(ctx)
	if err != nil {
		return code(err)
	}
	for at := range messages {
		sent := &testing.Payload{Body: bytes.Repeat([]byte{byte(at)}, at*100)}
		err := stream.Send(&testing.StreamingOutputCallRequest{Payload: sent})
		// Where the stream has ended, the answer says why.
		if err != nil && !errors.Is(err, io.EOF) {
			return code(err)
		}
		response, err := stream.Recv()
		if err != nil {
			return code(err)
		}
		if !bytes.Equal(response.Payload.Body, sent.Body) {
			return "other bytes came back"
		}
	}
	if err := stream.CloseSend(); err != nil {
		return code(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		return code(err)
	}
	return "OK"
}

// code is that of gRPC, and an EOF in the handshake of TLS where there was one.
func code(err error) string {
	seen := status.Convert(err)
	if strings.Contains(seen.Message(), "handshake failed: EOF") {
		return seen.Code().String() + ": EOF in the handshake"
	}
	return seen.Code().String()
}
