// Package v1alpha1 admits websites: each answer comes from the cache.
package v1alpha1

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	webv1alpha1 "ctrlmesh.dev/example-operator/api/v1alpha1"
)

const (
	// defaultsName is the ConfigMap of a namespace with the defaults of its websites.
	defaultsName = "website-defaults"

	// titleKey is the default title in that ConfigMap.
	titleKey = "title"
)

// +kubebuilder:webhook:path=/mutate-web-example-com-v1alpha1-website,mutating=true,failurePolicy=fail,sideEffects=None,groups=web.example.com,resources=websites,verbs=create,versions=v1alpha1,name=mwebsite-v1alpha1.kb.io,admissionReviewVersions=v1
// +kubebuilder:webhook:path=/validate-web-example-com-v1alpha1-website,mutating=false,failurePolicy=fail,sideEffects=None,groups=web.example.com,resources=websites,verbs=create,versions=v1alpha1,name=vwebsite-v1alpha1.kb.io,admissionReviewVersions=v1

// WebsiteWebhook gives new websites a title, and refuses those beyond the limit of a namespace.
type WebsiteWebhook struct {
	// Reader reads the cache.
	client.Reader

	// MaxWebsites is how many websites a namespace may have.
	MaxWebsites int
}

// Default gives a website without a title the one of its namespace's ConfigMap, or its own name where there is none.
func (w *WebsiteWebhook) Default(ctx context.Context, site *webv1alpha1.Website) error {
	if site.Spec.Title != "" {
		return nil
	}
	namespace, err := namespaceOf(ctx)
	if err != nil {
		return err
	}
	defaults := &corev1.ConfigMap{}
	err = w.Get(ctx, client.ObjectKey{Namespace: namespace, Name: defaultsName}, defaults)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	site.Spec.Title = defaults.Data[titleKey]
	if site.Spec.Title == "" {
		site.Spec.Title = site.Name
	}
	return nil
}

// ValidateCreate refuses a website where its namespace has as many as it may have.
func (w *WebsiteWebhook) ValidateCreate(ctx context.Context, _ *webv1alpha1.Website) (admission.Warnings, error) {
	namespace, err := namespaceOf(ctx)
	if err != nil {
		return nil, err
	}
	sites := &webv1alpha1.WebsiteList{}
	if err := w.List(ctx, sites, client.InNamespace(namespace)); err != nil {
		return nil, err
	}
	if len(sites.Items) >= w.MaxWebsites {
		return nil, fmt.Errorf("namespace %s has %d websites, of %d at most", namespace, len(sites.Items), w.MaxWebsites)
	}
	return nil, nil
}

// ValidateUpdate allows every change.
func (w *WebsiteWebhook) ValidateUpdate(context.Context, *webv1alpha1.Website, *webv1alpha1.Website) (admission.Warnings, error) {
	return nil, nil
}

// ValidateDelete allows every deletion.
func (w *WebsiteWebhook) ValidateDelete(context.Context, *webv1alpha1.Website) (admission.Warnings, error) {
	return nil, nil
}

// namespaceOf is the namespace that the API server names.
func namespaceOf(ctx context.Context) (string, error) {
	request, err := admission.RequestFromContext(ctx)
	return request.Namespace, err
}

// SetupWithManager registers both webhooks.
func (w *WebsiteWebhook) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewWebhookManagedBy(mgr, &webv1alpha1.Website{}).
		WithDefaulter(w).
		WithValidator(w).
		Complete()
}
