package main

import (
	"flag"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"ctrlmesh.dev/example-operator/internal/controller"
)

// controllerOptions say which controller the operator runs, and how.
type controllerOptions struct {
	uncached, resync time.Duration
	concurrent       int
	fault            string
}

func (o *controllerOptions) bindFlags(flags *flag.FlagSet) {
	flags.IntVar(&o.concurrent, "max-concurrent-reconciles", 2, "How many websites are worked on at once.")
	flags.DurationVar(&o.uncached, "uncached", 0,
		"Read without a cache, write by server-side apply, and reconcile each website this often; 0 is off.")
	flags.DurationVar(&o.resync, "resync", 0, "Check each website this often, and write that into its status; 0 is off.")
	flags.StringVar(&o.fault, "fault", "",
		"Misbehave on purpose: garbage-status, hot, deaf, deleter, slow or crash; none without it.")
}

// setUp registers the controller: cached, not cached, or one that misbehaves.
func (o *controllerOptions) setUp(mgr ctrl.Manager) error {
	cached := controller.WebsiteReconciler{
		Client:                  mgr.GetClient(),
		Recorder:                mgr.GetEventRecorder("website-controller"),
		MaxConcurrentReconciles: o.concurrent,
		ResyncAfter:             o.resync,
	}
	if o.fault != "" {
		return (&controller.FaultyReconciler{WebsiteReconciler: cached, Fault: controller.Fault(o.fault)}).SetupWithManager(mgr)
	}
	if o.uncached == 0 {
		return cached.SetupWithManager(mgr)
	}
	direct, err := client.New(mgr.GetConfig(), client.Options{Scheme: scheme, HTTPClient: mgr.GetHTTPClient()})
	if err != nil {
		return err
	}
	return (&controller.UncachedReconciler{
		Client:                  direct,
		RequeueAfter:            o.uncached,
		MaxConcurrentReconciles: o.concurrent,
	}).SetupWithManager(mgr)
}
