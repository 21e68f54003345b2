package main

import (
	"encoding/json"
	"log"
	"net/http"
	"os"
	"path/filepath"
)

// The parts of an AdmissionReview that an answer needs.
type admissionReview struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Request    *admissionRequest `json:"request,omitempty"`
	Response   *admissionAnswer  `json:"response,omitempty"`
}

type admissionRequest struct {
	UID string `json:"uid"`
}

type admissionAnswer struct {
	UID     string          `json:"uid"`
	Allowed bool            `json:"allowed"`
	Status  admissionStatus `json:"status"`
}

type admissionStatus struct {
	Message string `json:"message"`
}

// review refuses whatever it is asked about, and says which pod does so.
func review(address, folder string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	answer := func(out http.ResponseWriter, request *http.Request) {
		var asked admissionReview
		if err := json.NewDecoder(request.Body).Decode(&asked); err != nil || asked.Request == nil {
			http.Error(out, "no review", http.StatusBadRequest)
			return
		}
		log.Printf("%s from %s", request.URL, request.RemoteAddr)
		refused := &admissionAnswer{UID: asked.Request.UID, Status: admissionStatus{Message: "answered by " + name}}
		out.Header().Set("Content-Type", "application/json")
		json.NewEncoder(out).Encode(admissionReview{APIVersion: asked.APIVersion, Kind: asked.Kind, Response: refused})
	}
	certificate, key := filepath.Join(folder, "tls.crt"), filepath.Join(folder, "tls.key")
	log.Printf("%s answers reviews at %s", name, address)
	return http.ListenAndServeTLS(address, certificate, key, http.HandlerFunc(answer))
}
