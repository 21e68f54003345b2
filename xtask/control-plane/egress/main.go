// Clients and servers of net/http and gRPC, for what a pod sends to other servers than the API server.
//
// `egress serve` runs the servers until its standard input ends. `egress ask` speaks with them in every way there is,
// by a host that the rules allow and by one that they do not; `egress together` has many connections at once. Both
// print one JSON object: for each client what it saw.
package main

import (
	"crypto/x509"
	"encoding/json"
	"flag"
	"log"
	"os"
	"time"
)

// Each server has a port of its own.
const (
	clearPort   = "8080"
	tlsPort     = "8443"
	grpcPort    = "9090"
	grpcTLSPort = "9443"
)

// Hosts that clients name. The certificate of the servers is for the first.
const (
	allowed = "localhost"
	refused = "other.test"
)

// How long a client waits before it gives up; none waits that long when all works.
const patience = time.Minute

func main() {
	flags := flag.NewFlagSet("egress", flag.ExitOnError)
	address := flags.String("address", "127.0.0.1", "IP address of the servers")
	certificate := flags.String("certificate", "", "file with the certificate of the servers")
	key := flags.String("key", "", "file with its key")
	ca := flags.String("ca", "", "file with the CA that clients trust")
	count := flags.Int("count", 1, "how many connections there are at once")
	if len(os.Args) < 2 {
		log.Fatal("say serve, ask or together")
	}
	if err := flags.Parse(os.Args[2:]); err != nil {
		log.Fatal(err)
	}
	if os.Args[1] == "serve" {
		serve(*address, *certificate, *key)
		return
	}
	text, err := os.ReadFile(*ca)
	if err != nil {
		log.Fatal(err)
	}
	clients := clients{address: *address, roots: x509.NewCertPool()}
	if !clients.roots.AppendCertsFromPEM(text) {
		log.Fatalf("no certificate in %s", *ca)
	}
	var seen map[string]string
	if os.Args[1] == "ask" {
		seen = clients.ask()
	} else {
		seen = clients.together(*count)
	}
	if err := json.NewEncoder(os.Stdout).Encode(seen); err != nil {
		log.Fatal(err)
	}
}
