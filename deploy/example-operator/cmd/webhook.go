package main

import (
	"flag"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	webhookv1alpha1 "ctrlmesh.dev/example-operator/internal/webhook/v1alpha1"
)

// webhookOptions says whether and how admission reviews of websites are answered.
type webhookOptions struct {
	certPath, certName, certKey string
	maxWebsites                 int
}

func (o *webhookOptions) bindFlags(flags *flag.FlagSet) {
	flags.StringVar(&o.certPath, "webhook-cert-path", "",
		"The directory that contains the webhook certificate; none is no webhook.")
	flags.StringVar(&o.certName, "webhook-cert-name", "tls.crt", "The name of the webhook certificate file.")
	flags.StringVar(&o.certKey, "webhook-cert-key", "tls.key", "The name of the webhook key file.")
	flags.IntVar(&o.maxWebsites, "max-websites", 3, "How many websites the webhook lets a namespace have.")
}

// server serves at port 9443, once something is registered with it.
func (o *webhookOptions) server() webhook.Server {
	return webhook.NewServer(webhook.Options{CertDir: o.certPath, CertName: o.certName, KeyName: o.certKey})
}

// setUp registers the webhooks, and has the replica be ready once they are served.
func (o *webhookOptions) setUp(mgr ctrl.Manager) error {
	if o.certPath == "" {
		return nil
	}
	websites := &webhookv1alpha1.WebsiteWebhook{Reader: mgr.GetClient(), MaxWebsites: o.maxWebsites}
	if err := websites.SetupWithManager(mgr); err != nil {
		return err
	}
	return mgr.AddReadyzCheck("webhook", mgr.GetWebhookServer().StartedChecker())
}
