// An operator of many clusters, as one writes it with controller-runtime: a cache and a controller for each member,
// which it reaches behind a path of the host. For each source in a member it keeps a page there, and comes back to it
// by a timer.
package main

import (
	"context"
	"flag"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

var clusters = schema.GroupVersionKind{Group: "fleet.test", Version: "v1", Kind: "Cluster"}

const (
	sourcePrefix = "source-"
	pagePrefix   = "page-"
)

func main() {
	var path, metrics, probes, lockNamespace string
	var resync time.Duration
	flag.StringVar(&path, "members", "", "The path of a member, with {cluster} in the place of its name.")
	flag.StringVar(&metrics, "metrics-bind-address", "0", "The address the metrics endpoint binds to.")
	flag.StringVar(&probes, "health-probe-bind-address", "0", "The address the probe endpoint binds to.")
	flag.StringVar(&lockNamespace, "leader-election-namespace", "", "Where the lock is.")
	flag.DurationVar(&resync, "resync", 200*time.Millisecond, "When a page is written again.")
	opts := zap.Options{}
	opts.BindFlags(flag.CommandLine)
	flag.Parse()
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&opts)))
	if err := run(path, metrics, probes, lockNamespace, resync); err != nil {
		ctrl.Log.Error(err, "the operator ended")
		os.Exit(1)
	}
}

func run(path, metrics, probes, lockNamespace string, resync time.Duration) error {
	mgr, err := ctrl.NewManager(ctrl.GetConfigOrDie(), ctrl.Options{
		Metrics:                       metricsserver.Options{BindAddress: metrics},
		HealthProbeBindAddress:        probes,
		LeaderElection:                true,
		LeaderElectionID:              "websites.web.example.com",
		LeaderElectionNamespace:       lockNamespace,
		LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		return err
	}
	kind := &metav1.PartialObjectMetadata{}
	kind.SetGroupVersionKind(clusters)
	fleet := &fleet{mgr: mgr, path: path, resync: resync, members: map[string]context.CancelFunc{}}
	if err := ctrl.NewControllerManagedBy(mgr).Named("fleet").For(kind).Complete(fleet); err != nil {
		return err
	}
	ctx := ctrl.SetupSignalHandler()
	fleet.ctx = ctx
	return mgr.Start(ctx)
}

// fleet engages the members that it learns of, one at a time.
type fleet struct {
	mgr     ctrl.Manager
	path    string
	resync  time.Duration
	ctx     context.Context
	members map[string]context.CancelFunc
}

func (f *fleet) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(clusters)
	err := f.mgr.GetClient().Get(ctx, request.NamespacedName, object)
	if apierrors.IsNotFound(err) {
		if leave, ok := f.members[request.Name]; ok {
			leave()
			delete(f.members, request.Name)
		}
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	if _, ok := f.members[request.Name]; ok {
		return ctrl.Result{}, nil
	}
	leave, err := f.engage(request.Name)
	if err != nil {
		return ctrl.Result{}, err
	}
	f.members[request.Name] = leave
	return ctrl.Result{}, nil
}

// engage starts what works in a member. Its objects are in the namespace that has its name.
func (f *fleet) engage(name string) (context.CancelFunc, error) {
	config := rest.CopyConfig(f.mgr.GetConfig())
	config.Host = strings.TrimRight(config.Host, "/") + strings.ReplaceAll(f.path, "{cluster}", name)
	config.QPS = -1
	member, err := cluster.New(config)
	if err != nil {
		return nil, err
	}
	pages := &pages{client: member.GetClient(), resync: f.resync}
	isSource := predicate.NewPredicateFuncs(func(object client.Object) bool {
		return object.GetNamespace() == name && strings.HasPrefix(object.GetName(), sourcePrefix)
	})
	skip := true
	worker, err := controller.NewUnmanaged("pages-"+name, controller.Options{
		Reconciler: pages, SkipNameValidation: &skip, Logger: f.mgr.GetLogger(),
	})
	if err != nil {
		return nil, err
	}
	maps := source.Kind(member.GetCache(), client.Object(&corev1.ConfigMap{}), &handler.EnqueueRequestForObject{}, isSource)
	if err := worker.Watch(maps); err != nil {
		return nil, err
	}
	ctx, leave := context.WithCancel(f.ctx)
	for _, part := range []interface{ Start(context.Context) error }{member, worker} {
		go func() {
			if err := part.Start(ctx); err != nil {
				f.mgr.GetLogger().Error(err, "a member ended", "member", name)
			}
		}()
	}
	return leave, nil
}

// pages keeps a page for each source.
type pages struct {
	client client.Client
	resync time.Duration
}

func (p *pages) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	source, page := &corev1.ConfigMap{}, &corev1.ConfigMap{}
	err := p.client.Get(ctx, request.NamespacedName, source)
	if apierrors.IsNotFound(err) {
		// Deleted, or another's by now.
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	page.Namespace, page.Name = source.Namespace, pagePrefix+strings.TrimPrefix(source.Name, sourcePrefix)
	_, err = ctrl.CreateOrUpdate(ctx, p.client, page, func() error {
		page.Data = map[string]string{"text": source.Data["text"], "at": time.Now().Format(time.RFC3339Nano)}
		return nil
	})
	return ctrl.Result{RequeueAfter: p.resync}, err
}
