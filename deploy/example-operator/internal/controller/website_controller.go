// Package controller makes websites what they should be.
package controller

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	webv1alpha1 "ctrlmesh.dev/example-operator/api/v1alpha1"
)

const (
	// finalizer keeps a website until its pages are gone.
	finalizer = "web.example.com/unpublish"

	// siteLabel is on every page, and names its website.
	siteLabel = "web.example.com/site"

	// bugAnnotation on a website switches a bug on: bugDeletePages is its only value.
	bugAnnotation = "web.example.com/bug"

	// bugDeletePages has the operator delete every page that it sees, of whatever website, again and again.
	bugDeletePages = "delete-pages"

	// bugInterval is how long a wild operator waits before it goes on.
	bugInterval = time.Second
)

// WebsiteReconciler reconciles websites.
type WebsiteReconciler struct {
	client.Client
	Recorder events.EventRecorder

	// MaxConcurrentReconciles is how many websites are worked on at once.
	MaxConcurrentReconciles int

	// ResyncAfter is how long a website is left alone before it is checked again, and its status says so; 0 is for ever.
	ResyncAfter time.Duration
}

// +kubebuilder:rbac:groups=web.example.com,resources=websites,verbs=get;list;watch;update;patch
// +kubebuilder:rbac:groups=web.example.com,resources=websites/status,verbs=get;update;patch
// +kubebuilder:rbac:groups=web.example.com,resources=websites/finalizers,verbs=update
// +kubebuilder:rbac:groups="",resources=configmaps,verbs=get;list;watch;create;update;patch;delete
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// Reconcile makes one website what it should be.
func (r *WebsiteReconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	site := &webv1alpha1.Website{}
	if err := r.Get(ctx, request.NamespacedName, site); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !site.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.unpublish(ctx, site)
	}
	if controllerutil.AddFinalizer(site, finalizer) {
		if err := r.Update(ctx, site); err != nil {
			return ctrl.Result{}, err
		}
	}
	if site.Annotations[bugAnnotation] == bugDeletePages {
		err := r.deleteAllPages(ctx)
		log.FromContext(ctx).Info("runs wild", "error", err)
		return ctrl.Result{RequeueAfter: bugInterval}, nil
	}
	changed, err := r.publish(ctx, site)
	if err != nil {
		r.Recorder.Eventf(site, nil, corev1.EventTypeWarning, "Failed", "Publish", "%v", err)
		return ctrl.Result{}, err
	}
	if changed {
		r.Recorder.Eventf(site, nil, corev1.EventTypeNormal, "Published", "Publish", "%d pages", site.Spec.Pages)
	}
	if err := r.updateStatus(ctx, site); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: r.untilResync(site)}, nil
}

// publish makes the pages that there should be and removes the others; it says whether it had to.
func (r *WebsiteReconciler) publish(ctx context.Context, site *webv1alpha1.Website) (bool, error) {
	wanted := make(map[string]bool, site.Spec.Pages)
	changed := false
	for number := range site.Spec.Pages {
		page := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Namespace: site.Namespace,
			Name:      pageName(site, number),
		}}
		wanted[page.Name] = true
		result, err := controllerutil.CreateOrUpdate(ctx, r.Client, page, func() error {
			metav1.SetMetaDataLabel(&page.ObjectMeta, siteLabel, site.Name)
			page.Data = map[string]string{"index.html": fmt.Sprintf("<h1>%s</h1><p>page %d</p>\n", site.Spec.Title, number)}
			return controllerutil.SetControllerReference(site, page, r.Scheme())
		})
		if err != nil {
			return false, fmt.Errorf("page %s: %w", page.Name, err)
		}
		changed = changed || result != controllerutil.OperationResultNone
	}
	pages, err := r.pages(ctx, site)
	if err != nil {
		return false, err
	}
	for i := range pages {
		if wanted[pages[i].Name] {
			continue
		}
		if err := client.IgnoreNotFound(r.Delete(ctx, &pages[i])); err != nil {
			return false, fmt.Errorf("page %s: %w", pages[i].Name, err)
		}
		changed = true
	}
	return changed, nil
}

// unpublish removes the pages, and then lets the website go.
func (r *WebsiteReconciler) unpublish(ctx context.Context, site *webv1alpha1.Website) error {
	if !controllerutil.ContainsFinalizer(site, finalizer) {
		return nil
	}
	pages, err := r.pages(ctx, site)
	if err != nil {
		return err
	}
	for i := range pages {
		if err := client.IgnoreNotFound(r.Delete(ctx, &pages[i])); err != nil {
			return fmt.Errorf("page %s: %w", pages[i].Name, err)
		}
	}
	r.Recorder.Eventf(site, nil, corev1.EventTypeNormal, "Unpublished", "Unpublish", "%d pages", len(pages))
	log.FromContext(ctx).Info("unpublished", "pages", len(pages))
	controllerutil.RemoveFinalizer(site, finalizer)
	return client.IgnoreNotFound(r.Update(ctx, site))
}

// deleteAllPages deletes the pages of all websites, until one cannot be deleted.
func (r *WebsiteReconciler) deleteAllPages(ctx context.Context) error {
	pages := &corev1.ConfigMapList{}
	if err := r.List(ctx, pages, client.HasLabels{siteLabel}); err != nil {
		return err
	}
	for i := range pages.Items {
		if err := client.IgnoreNotFound(r.Delete(ctx, &pages.Items[i])); err != nil {
			return err
		}
	}
	return nil
}

func (r *WebsiteReconciler) updateStatus(ctx context.Context, site *webv1alpha1.Website) error {
	before := site.DeepCopy()
	site.Status.ObservedGeneration = site.Generation
	site.Status.Pages = site.Spec.Pages
	if r.isResyncDue(site) {
		now := metav1.NowMicro()
		site.Status.LastSync = &now
	}
	meta.SetStatusCondition(&site.Status.Conditions, metav1.Condition{
		Type:               webv1alpha1.ConditionPublished,
		Status:             metav1.ConditionTrue,
		Reason:             "PagesWritten",
		Message:            fmt.Sprintf("%d pages are there", site.Spec.Pages),
		ObservedGeneration: site.Generation,
	})
	// A patch without content would still be a request.
	patch := client.MergeFrom(before)
	if data, err := patch.Data(site); err != nil || string(data) == "{}" {
		return err
	}
	return r.Status().Patch(ctx, site, patch)
}

// isResyncDue is by the clock, so that the write does not cause the next one.
func (r *WebsiteReconciler) isResyncDue(site *webv1alpha1.Website) bool {
	last := site.Status.LastSync
	return r.ResyncAfter > 0 && (last == nil || time.Since(last.Time) >= r.ResyncAfter)
}

// untilResync is how long the website can be left alone; 0 is for ever.
func (r *WebsiteReconciler) untilResync(site *webv1alpha1.Website) time.Duration {
	if r.ResyncAfter == 0 || site.Status.LastSync == nil {
		return 0
	}
	return max(time.Until(site.Status.LastSync.Add(r.ResyncAfter)), time.Millisecond)
}

func pageName(site *webv1alpha1.Website, number int32) string {
	return fmt.Sprintf("%s-page-%d", site.Name, number)
}

// pages are the website's own, as far as the cache knows.
func (r *WebsiteReconciler) pages(ctx context.Context, site *webv1alpha1.Website) ([]corev1.ConfigMap, error) {
	list := &corev1.ConfigMapList{}
	if err := r.List(ctx, list, client.InNamespace(site.Namespace), client.MatchingLabels{siteLabel: site.Name}); err != nil {
		return nil, err
	}
	own := list.Items[:0]
	for _, page := range list.Items {
		if metav1.IsControlledBy(&page, site) {
			own = append(own, page)
		}
	}
	return own, nil
}

// SetupWithManager registers the controller.
func (r *WebsiteReconciler) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		For(&webv1alpha1.Website{}).
		Owns(&corev1.ConfigMap{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: r.MaxConcurrentReconciles}).
		Complete(r)
}
