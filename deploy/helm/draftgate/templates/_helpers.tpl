{{- define "draftgate.fullname" -}}
{{- if contains "draftgate" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-draftgate" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Labels of the pods of a component. Arguments: the root, the component. */ -}}
{{- define "draftgate.labels" -}}
app.kubernetes.io/name: draftgate
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- /* Name and labels of an object. Arguments: the root, the component, a suffix of the name. */ -}}
{{- define "draftgate.metadata" -}}
name: {{ include "draftgate.fullname" (index . 0) }}-{{ index . 1 }}{{ if gt (len .) 2 }}{{ index . 2 }}{{ end }}
labels:
  {{- include "draftgate.labels" . | nindent 2 }}
{{- end -}}

{{- /* The settings of the pod of a node. Arguments: the root, the component. */ -}}
{{- define "draftgate.pod" -}}
{{- $root := index . 0 -}}
{{- $node := index $root.Values (index . 1) -}}
automountServiceAccountToken: false
enableServiceLinks: false
# preStop, the drain timeout, and time to close
terminationGracePeriodSeconds: {{ add $root.Values.drainTimeoutS 15 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "draftgate.labels" . | nindent 8 }}
{{- range $key := list "nodeSelector" "affinity" "tolerations" }}
{{- with index $node $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The container of a node, without its resources. Arguments: the root, the component, the
       arguments of `serve`, the seconds of the startup probe. */ -}}
{{- define "draftgate.container" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $node := index $root.Values $component -}}
name: {{ $component }}
image: {{ $root.Values.image.repository }}:{{ $node.imageTag }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
args:
  - serve
  {{- range index . 2 }}
  - {{ . }}
  {{- end }}
  - --host
  - 0.0.0.0
  - --port
  - "8000"
  {{- if $root.Values.cluster.enabled }}
  - --peer-secret-env
  - PEER_SECRET
  {{- end }}
  - --drain-timeout-s
  - {{ $root.Values.drainTimeoutS | quote }}
env:
  - name: DRAFTGATE_CONFIG
    value: /etc/draftgate/config.yaml
  {{- if $root.Values.apiKeys.secret }}
  - name: DRAFTGATE_API_KEYS_FILE
    value: /etc/draftgate-keys/{{ $root.Values.apiKeys.key }}
  {{- end }}
  {{- if $root.Values.cluster.enabled }}
  - name: DRAFTGATE_JOIN
    valueFrom:
      secretKeyRef:
        name: {{ $root.Values.secret }}
        key: join
  - name: PEER_SECRET
    valueFrom:
      secretKeyRef:
        name: {{ $root.Values.secret }}
        key: peer-secret
  {{- end }}
  {{- if eq $component "worker" }}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef:
        name: {{ $root.Values.secret }}
        key: hf-token
        optional: true
  {{- end }}
  {{- with $node.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: http
    containerPort: 8000
# /health checks only this process, independent of Redis, upstreams and workers.
startupProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 2
  failureThreshold: {{ div (index . 3) 2 }}
livenessProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet:
    path: /ready
    port: http
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
lifecycle:
  preStop:  # proxies remove the pod before SIGTERM, which refuses new requests
    exec:
      command: [sleep, "5"]
securityContext:
  {{- include "draftgate.confined" . | nindent 2 }}
{{- end -}}

{{- define "draftgate.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* The mounts of settings and keys of a node. Arguments: the root, the component. */ -}}
{{- define "draftgate.mounts" -}}
- name: config
  mountPath: /etc/draftgate
  readOnly: true
{{- if (index . 0).Values.apiKeys.secret }}
- name: api-keys
  mountPath: /etc/draftgate-keys
  readOnly: true
{{- end }}
{{- end -}}

{{- define "draftgate.volumes" -}}
- name: config
  configMap:
    name: {{ include "draftgate.fullname" (index . 0) }}-{{ index . 1 }}
{{- with (index . 0).Values.apiKeys.secret }}
- name: api-keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- /* The settings of a node as the file of `draftgate serve --config`. */ -}}
{{- define "draftgate.config" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "draftgate.metadata" . | nindent 2 }}
data:
  config.yaml: |
    {{- toYaml (index (index . 0).Values (index . 1)).config | nindent 4 }}
{{- end -}}

{{- /* The annotations of the pods of a node. Changed settings replace the pods. */ -}}
{{- define "draftgate.annotations" -}}
{{- $node := index (index . 0).Values (index . 1) -}}
checksum/config: {{ toYaml $node.config | sha256sum }}
{{- with $node.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "draftgate.nodes" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: draftgate
      app.kubernetes.io/instance: {{ .Release.Name }}
    matchExpressions:
      - key: app.kubernetes.io/component
        operator: In
        values: [gateway, worker]
{{- end -}}

{{- define "draftgate.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: 0
  policies:  # the streams of one worker at a time move to the other workers
    - type: Pods
      value: 1
      periodSeconds: 60
{{- end -}}

{{- define "draftgate.monitoring" -}}
name: {{ include "draftgate.fullname" (index . 0) }}-{{ index . 1 }}
labels:
  app.kubernetes.io/name: draftgate
  app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
  {{- with index . 2 }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
