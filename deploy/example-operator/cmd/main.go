// An operator that publishes websites.
package main

import (
	"context"
	"flag"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	webv1alpha1 "ctrlmesh.dev/example-operator/api/v1alpha1"
)

var (
	scheme   = runtime.NewScheme()
	setupLog = ctrl.Log.WithName("setup")
)

func init() {
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(webv1alpha1.AddToScheme(scheme))
}

func main() {
	var metricsAddr, probeAddr, lockNamespace string
	var leaderElect, ignoreSigterm bool
	var options controllerOptions
	var webhooks webhookOptions
	flag.StringVar(&metricsAddr, "metrics-bind-address", ":8080", "The address the metrics endpoint binds to.")
	flag.StringVar(&probeAddr, "health-probe-bind-address", ":8081", "The address the probe endpoint binds to.")
	flag.BoolVar(&leaderElect, "leader-elect", false, "Let one replica at a time be active.")
	flag.StringVar(&lockNamespace, "leader-election-namespace", "", "Where the lock is, if not where the operator runs.")
	options.bindFlags(flag.CommandLine)
	flag.BoolVar(&ignoreSigterm, "ignore-sigterm", false, "Work on after SIGTERM, until killed.")
	webhooks.bindFlags(flag.CommandLine)
	opts := zap.Options{}
	opts.BindFlags(flag.CommandLine)
	flag.Parse()
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&opts)))

	mgr, err := ctrl.NewManager(ctrl.GetConfigOrDie(), ctrl.Options{
		Scheme:                        scheme,
		Metrics:                       metricsserver.Options{BindAddress: metricsAddr},
		HealthProbeBindAddress:        probeAddr,
		WebhookServer:                 webhooks.server(),
		LeaderElection:                leaderElect,
		LeaderElectionID:              "websites.web.example.com",
		LeaderElectionNamespace:       lockNamespace,
		LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		setupLog.Error(err, "unable to create the manager")
		os.Exit(1)
	}
	if err := options.setUp(mgr); err != nil {
		setupLog.Error(err, "unable to create the controller")
		os.Exit(1)
	}
	if err := webhooks.setUp(mgr); err != nil {
		setupLog.Error(err, "unable to create the webhooks")
		os.Exit(1)
	}
	if err := mgr.AddHealthzCheck("healthz", healthz.Ping); err != nil {
		setupLog.Error(err, "unable to set up the health check")
		os.Exit(1)
	}
	if err := mgr.AddReadyzCheck("readyz", healthz.Ping); err != nil {
		setupLog.Error(err, "unable to set up the readiness check")
		os.Exit(1)
	}
	setupLog.Info("starting")
	if err := mgr.Start(untilSigterm(ignoreSigterm)); err != nil {
		setupLog.Error(err, "the manager ended")
		os.Exit(1)
	}
}

// untilSigterm ends with SIGTERM, or never where that is ignored.
func untilSigterm(ignored bool) context.Context {
	if ignored {
		signal.Ignore(syscall.SIGTERM)
		return context.Background()
	}
	return ctrl.SetupSignalHandler()
}
