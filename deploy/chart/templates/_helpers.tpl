{{/* The labels of every object. */}}
{{- define "ctrlmesh.labels" -}}
app.kubernetes.io/part-of: ctrlmesh
{{- end }}

{{/* An image, of the dictionary (root, image). */}}
{{- define "ctrlmesh.image" -}}
{{- $name := printf "%s/%s" .root.Values.images.registry .image.repository -}}
{{- if .image.digest -}}
{{ $name }}@{{ .image.digest }}
{{- else -}}
{{ $name }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* CIDRs as the peers of a rule of a NetworkPolicy. */}}
{{- define "ctrlmesh.from" -}}
from:
{{- range . }}
- ipBlock:
    cidr: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Refuses a namespace in which our programs do not find each other. */}}
{{- define "ctrlmesh.namespace" -}}
{{- if ne .Release.Namespace "ctrlmesh-system" -}}
{{- fail (printf "ctrlmesh runs in namespace ctrlmesh-system only, and not in %s: the roles of its accounts and the command ctrlmesh name it. Give --namespace ctrlmesh-system" .Release.Namespace) -}}
{{- end -}}
ctrlmesh-system
{{- end }}

{{/* In CEL, the keys that two variables with maps do not have in common, of the list (before, after). */}}
{{- define "ctrlmesh.changedKeys" -}}
{{- $before := printf "variables.%s" (index . 0) -}}
{{- $after := printf "variables.%s" (index . 1) -}}
{{ $after }}.map(key, key).filter(key,
!(key in {{ $before }}) || {{ $before }}[key] != {{ $after }}[key])
+ {{ $before }}.map(key, key).filter(key, !(key in {{ $after }}))
{{- end }}
