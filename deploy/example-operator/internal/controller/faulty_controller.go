package controller

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	webv1alpha1 "ctrlmesh.dev/example-operator/api/v1alpha1"
)

// Fault is how a version of the operator misbehaves.
type Fault string

const (
	// FaultGarbageStatus writes a status that the schema refuses, and nothing else. It backs off as after any error.
	FaultGarbageStatus Fault = "garbage-status"

	// FaultHot works, and writes the pages of each website again and again.
	FaultHot Fault = "hot"

	// FaultDeaf watches, and does nothing.
	FaultDeaf Fault = "deaf"

	// FaultDeleter deletes the pages of each website again and again.
	FaultDeleter Fault = "deleter"

	// FaultSlow works on a website slowDelay after it changed.
	FaultSlow Fault = "slow"

	// FaultCrash works for crashDelay, and exits.
	FaultCrash Fault = "crash"
)

const (
	// hotInterval is short enough for a steady load of writes.
	hotInterval = 10 * time.Millisecond

	slowDelay = 15 * time.Second

	// crashDelay counts from the moment at which the operator is active.
	crashDelay = 10 * time.Second

	// writesAnnotation on a page counts its needless writes.
	writesAnnotation = "web.example.com/writes"
)

// FaultyReconciler is a version of the WebsiteReconciler that misbehaves on purpose: something has to hold it back.
type FaultyReconciler struct {
	WebsiteReconciler

	// Fault is what it does wrong.
	Fault Fault

	// due has when to work on a website, by its name.
	due sync.Map
}

// Reconcile does to one website what the fault says.
func (r *FaultyReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	switch r.Fault {
	case FaultGarbageStatus:
		return ctrl.Result{}, r.writeGarbage(ctx, request.NamespacedName)
	case FaultHot:
		if _, err := r.WebsiteReconciler.Reconcile(ctx, request); err != nil {
			return ctrl.Result{}, err
		}
		return r.onWebsite(ctx, request, hotInterval, r.rewritePages)
	case FaultDeaf:
		return ctrl.Result{}, nil
	case FaultSlow:
		return r.late(ctx, request)
	case FaultDeleter:
		return r.onWebsite(ctx, request, bugInterval, r.deletePages)
	default:
		return r.WebsiteReconciler.Reconcile(ctx, request)
	}
}

// late leaves a website alone until slowDelay is over.
func (r *FaultyReconciler) late(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	due, _ := r.due.LoadOrStore(request.NamespacedName, time.Now().Add(slowDelay))
	if left := time.Until(due.(time.Time)); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	r.due.Delete(request.NamespacedName)
	return r.WebsiteReconciler.Reconcile(ctx, request)
}

// onWebsite works on a website at this interval, until that is gone.
func (r *FaultyReconciler) onWebsite(ctx context.Context, request ctrl.Request, interval time.Duration,
	work func(context.Context, *webv1alpha1.Website) error) (ctrl.Result, error) {
	site := &webv1alpha1.Website{}
	if err := r.Get(ctx, request.NamespacedName, site); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if err := work(ctx, site); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: interval}, nil
}

func (r *FaultyReconciler) writeGarbage(ctx context.Context, name types.NamespacedName) error {
	site := &webv1alpha1.Website{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
	garbage := client.RawPatch(types.MergePatchType, []byte(`{"status":{"pages":"many"}}`))
	return client.IgnoreNotFound(r.Status().Patch(ctx, site, garbage))
}

func (r *FaultyReconciler) rewritePages(ctx context.Context, site *webv1alpha1.Website) error {
	pages, err := r.pages(ctx, site)
	if err != nil {
		return err
	}
	for i := range pages {
		before := pages[i].DeepCopy()
		writes, _ := strconv.Atoi(before.Annotations[writesAnnotation])
		metav1.SetMetaDataAnnotation(&pages[i].ObjectMeta, writesAnnotation, strconv.Itoa(writes+1))
		if err := client.IgnoreNotFound(r.Patch(ctx, &pages[i], client.MergeFrom(before))); err != nil {
			return fmt.Errorf("page %s: %w", pages[i].Name, err)
		}
	}
	return nil
}

// deletePages asks for it whether they are there or not.
func (r *FaultyReconciler) deletePages(ctx context.Context, site *webv1alpha1.Website) error {
	for number := range site.Spec.Pages {
		page := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: site.Namespace, Name: pageName(site, number)}}
		if err := client.IgnoreNotFound(r.Delete(ctx, page)); err != nil {
			return fmt.Errorf("page %s: %w", page.Name, err)
		}
	}
	return nil
}

// crash ends the process. As a part of the manager it starts when the controllers do: where there is a lock, with that.
func crash(ctx context.Context) error {
	select {
	case <-ctx.Done():
	case <-time.After(crashDelay):
		log.FromContext(ctx).Info("crashes on purpose")
		os.Exit(1)
	}
	return nil
}

// SetupWithManager registers the controller.
func (r *FaultyReconciler) SetupWithManager(mgr ctrl.Manager) error {
	switch r.Fault {
	case FaultGarbageStatus, FaultHot, FaultDeaf, FaultDeleter, FaultSlow:
	case FaultCrash:
		if err := mgr.Add(manager.RunnableFunc(crash)); err != nil {
			return err
		}
	default:
		return fmt.Errorf("there is no fault %q", r.Fault)
	}
	return ctrl.NewControllerManagedBy(mgr).
		For(&webv1alpha1.Website{}).
		Owns(&corev1.ConfigMap{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: r.MaxConcurrentReconciles}).
		Complete(r)
}
