// client-go's leader election, as any Go operator runs it.
//
// It takes the Lease "lead", and prints one line once it leads. It writes CBOR, if client-go's gates in the environment allow
// that.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

func main() {
	server := flag.String("server", "", "URL of the API server")
	authority := flag.String("ca", "", "file with its certificate authority")
	token := flag.String("token", "", "bearer token")
	namespace := flag.String("namespace", "ops", "namespace of the Lease")
	flag.Parse()
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host:            *server,
		BearerToken:     *token,
		TLSClientConfig: rest.TLSClientConfig{CAFile: *authority},
		// Clients of built-in types choose protobuf by themselves.
		ContentConfig: rest.ContentConfig{ContentType: "application/cbor"},
	})
	if err != nil {
		log.Fatal(err)
	}
	leaderelection.RunOrDie(context.Background(), leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: *namespace, Name: "lead"},
			Client:     client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: "elector"},
		},
		LeaseDuration: 15 * time.Second,
		RenewDeadline: 10 * time.Second,
		RetryPeriod:   100 * time.Millisecond,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) {
				fmt.Println("leading")
				<-ctx.Done()
			},
			OnStoppedLeading: func() {},
		},
	})
}
