{{- define "fastserve.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "fastserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "fastserve.workerSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-worker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "fastserve.labels" -}}
{{ include "fastserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The mean wait for a worker over the last minute; 0 where nobody asks. */}}
{{- define "fastserve.queueQuery" -}}
{{- $of := printf "{namespace=%q, job=%q}" .Release.Namespace (include "fastserve.name" .) -}}
sum(rate(fastserve_queue_duration_seconds_sum{{ $of }}[1m])) / clamp_min(sum(rate(fastserve_queue_duration_seconds_count{{ $of }}[1m])), 0.001)
{{- end -}}
