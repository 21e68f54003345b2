package controller

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"

	webv1alpha1 "ctrlmesh.dev/example-operator/api/v1alpha1"
)

// fieldOwner names the controller in server-side apply.
const fieldOwner = client.FieldOwner("website-controller")

// UncachedReconciler reconciles websites as operators do that keep no cache: it reads each object from the API server,
// writes by server-side apply, and comes back by a timer. It goes on with a website until that is gone.
type UncachedReconciler struct {
	// Client reads from the API server.
	client.Client

	// RequeueAfter is how long a website is left alone.
	RequeueAfter time.Duration

	// MaxConcurrentReconciles is how many websites are worked on at once.
	MaxConcurrentReconciles int
}

// Reconcile applies the pages of one website, and its status.
func (r *UncachedReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	again := ctrl.Result{RequeueAfter: r.RequeueAfter}
	site := unstructuredOf(webv1alpha1.GroupVersion.String(), "Website", request.Namespace, request.Name)
	if err := r.Get(ctx, request.NamespacedName, site); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	pages, _, err := unstructured.NestedInt64(site.Object, "spec", "pages")
	if err != nil {
		return ctrl.Result{}, err
	}
	checked := time.Now().UTC().Format(time.RFC3339Nano)
	for number := range pages {
		page := unstructuredOf("v1", "ConfigMap", request.Namespace, fmt.Sprintf("%s-page-%d", request.Name, number))
		page.SetLabels(map[string]string{siteLabel: request.Name})
		page.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(site, site.GroupVersionKind())})
		page.Object["data"] = map[string]any{"checked": checked}
		if err := r.apply(ctx, page); err != nil {
			return again, fmt.Errorf("page %s: %w", page.GetName(), err)
		}
	}
	status := unstructuredOf(webv1alpha1.GroupVersion.String(), "Website", request.Namespace, request.Name)
	status.Object["status"] = map[string]any{"observedGeneration": site.GetGeneration(), "pages": pages}
	return again, r.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(status), client.ForceOwnership, fieldOwner)
}

func (r *UncachedReconciler) apply(ctx context.Context, object *unstructured.Unstructured) error {
	return r.Apply(ctx, client.ApplyConfigurationFromUnstructured(object), client.ForceOwnership, fieldOwner)
}

func unstructuredOf(apiVersion, kind, namespace, name string) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetAPIVersion(apiVersion)
	object.SetKind(kind)
	object.SetNamespace(namespace)
	object.SetName(name)
	return object
}

// SetupWithManager registers the controller.
func (r *UncachedReconciler) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		For(&webv1alpha1.Website{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: r.MaxConcurrentReconciles}).
		Complete(r)
}
