package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ConditionPublished says whether every page is as the spec wants it.
const ConditionPublished = "Published"

// WebsiteSpec is what a website should be.
type WebsiteSpec struct {
	// Title stands on every page.
	// +kubebuilder:validation:MinLength=1
	Title string `json:"title"`

	// Pages is the number of pages.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=1
	Pages int32 `json:"pages"`
}

// WebsiteStatus is what a website is.
type WebsiteStatus struct {
	// ObservedGeneration is the generation that the rest of the status is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// Pages is the number of pages that are there.
	// +optional
	Pages int32 `json:"pages"`

	// LastSync is when the website was last checked by a timer. Absent: the operator has none.
	// +optional
	LastSync *metav1.MicroTime `json:"lastSync,omitempty"`

	// Conditions of the website.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Pages",type=integer,JSONPath=`.status.pages`
// +kubebuilder:printcolumn:name="Published",type=string,JSONPath=`.status.conditions[?(@.type=="Published")].status`

// Website is a set of pages, each in a ConfigMap.
type Website struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   WebsiteSpec   `json:"spec"`
	Status WebsiteStatus `json:"status,omitempty"`
}

// +kubebuilder:object:root=true

// WebsiteList is a list of websites.
type WebsiteList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Website `json:"items"`
}

func init() {
	SchemeBuilder.Register(&Website{}, &WebsiteList{})
}
