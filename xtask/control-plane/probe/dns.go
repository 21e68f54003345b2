package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"
)

// Where a pod finds its account.
const account = "/var/run/secrets/kubernetes.io/serviceaccount/"

// The cluster's domain.
const domain = ".svc.cluster.local"

// Kinds and classes of the questions that are answered.
const (
	typeA     = 1
	typeAAAA  = 28
	classIN   = 1
	noError   = 0
	noSuch    = 3
	notServed = 4
)

// dns answers as the DNS server of a cluster does: SERVICE.NAMESPACE.svc.cluster.local is the Service's address, which
// the API server is asked for each time.
func dns(address string) error {
	socket, err := net.ListenPacket("udp", address)
	if err != nil {
		return err
	}
	log.Printf("answers %s", socket.LocalAddr())
	client, err := apiClient()
	if err != nil {
		return err
	}
	buffer := make([]byte, 1500)
	for {
		bytes, from, err := socket.ReadFrom(buffer)
		if err != nil {
			return err
		}
		question := append([]byte(nil), buffer[:bytes]...)
		go func() {
			if answer := answer(client, question); answer != nil {
				// Whoever asked asks again.
				_, _ = socket.WriteTo(answer, from)
			}
		}()
	}
}

func apiClient() (*http.Client, error) {
	pem, err := os.ReadFile(account + "ca.crt")
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, errors.New("no certificate in ca.crt")
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
	return &http.Client{Transport: transport, Timeout: 3 * time.Second}, nil
}

// answer to a question in DNS's own form; nothing where it is none.
func answer(client *http.Client, question []byte) []byte {
	name, end, err := readName(question)
	if err != nil {
		return nil
	}
	kind, class := binary.BigEndian.Uint16(question[end:]), binary.BigEndian.Uint16(question[end+2:])
	code, addresses := notServed, []netip.Addr(nil)
	if class == classIN {
		code, addresses = lookUp(client, name)
	}
	out := append([]byte(nil), question[:end+4]...)
	// An answer, by whom it is to be had from; no further records are taken over from the question.
	out[2], out[3] = 0x84|question[2]&1, 0x80|byte(code)
	answers := 0
	for _, address := range addresses {
		wanted := address.Is4() && kind == typeA || address.Is6() && kind == typeAAAA
		if !wanted {
			continue
		}
		answers++
		raw := address.AsSlice()
		out = append(out, 0xc0, 12, byte(kind>>8), byte(kind), 0, classIN, 0, 0, 0, 5, 0, byte(len(raw)))
		out = append(out, raw...)
	}
	copy(out[4:12], []byte{0, 1, byte(answers >> 8), byte(answers), 0, 0, 0, 0})
	return out
}

// readName reads the name in the first question, and where it ends.
func readName(question []byte) (string, int, error) {
	short := errors.New("no question")
	if len(question) < 12 {
		return "", 0, short
	}
	var labels []string
	at := 12
	for {
		if at >= len(question) || question[at] > 63 {
			return "", 0, short
		}
		length := int(question[at])
		at++
		if length == 0 {
			break
		}
		if at+length > len(question) {
			return "", 0, short
		}
		labels = append(labels, strings.ToLower(string(question[at:at+length])))
		at += length
	}
	if at+4 > len(question) {
		return "", 0, short
	}
	return strings.Join(labels, "."), at, nil
}

func lookUp(client *http.Client, name string) (int, []netip.Addr) {
	service, ours := strings.CutSuffix(name, domain)
	parts := strings.Split(service, ".")
	if !ours || len(parts) != 2 {
		return noSuch, nil
	}
	var object struct {
		Spec struct{ ClusterIPs []netip.Addr }
	}
	path := fmt.Sprintf("/api/v1/namespaces/%s/services/%s", parts[1], parts[0])
	status, err := apiGet(client, path, &object)
	switch {
	case status == http.StatusNotFound:
		return noSuch, nil
	case err != nil:
		log.Printf("%s: %v", name, err)
		return 2, nil
	}
	return noError, object.Spec.ClusterIPs
}

func apiGet(client *http.Client, path string, into any) (int, error) {
	token, err := os.ReadFile(account + "token")
	if err != nil {
		return 0, err
	}
	host := net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))
	request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "https://"+host+path, nil)
	if err != nil {
		return 0, err
	}
	request.Header.Set("Authorization", "Bearer "+string(token))
	response, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return response.StatusCode, errors.New(response.Status)
	}
	return response.StatusCode, json.NewDecoder(response.Body).Decode(into)
}
