"""What deploy/kubernetes renders is what Kubernetes takes, and says what the server needs. Rendered by the real kubectl."""

import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

from headrace.config import load_config
from headrace.gateway.http.routes import Endpoint, resolve

ROOT = Path(__file__).parents[3]
OVERLAYS = sorted(path.name for path in (ROOT / "deploy/kubernetes/overlays").iterdir())
_OPERATORS = {"ServiceMonitor", "PrometheusRule"}
"""Kinds that are not Kubernetes' own: there is no schema of them to hold them to."""
KUBECTL = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")


@pytest.fixture(scope="module")
def rendered():
    found = {}
    for overlay in OVERLAYS:
        done = subprocess.run(
            [KUBECTL, "kustomize", ROOT / "deploy/kubernetes/overlays" / overlay],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
        found[overlay] = list(yaml.safe_load_all(done.stdout))
    return found


def of_kind(documents, kind):
    return [document for document in documents if document["kind"] == kind]


def configuration(container, tmp_path):
    """The server's configuration as the container's arguments make it; its repository does not exist here."""
    assert container["args"][0] == "serve"
    return load_config([re.sub("^(--model-repository)=.*", rf"\1={tmp_path}", word) for word in container["args"][1:]])


def containers(documents):
    for deployment in of_kind(documents, "Deployment"):
        yield from deployment["spec"]["template"]["spec"]["containers"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_rendered_keeps_the_schemas_of_kubernetes(rendered, overlay):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own use of pkg_resources
        import kubernetes_validate
    checked = 0
    for document in rendered[overlay]:
        if document["kind"] not in _OPERATORS:
            kubernetes_validate.validate(document, "1.31", strict=True)
            checked += 1
    assert checked >= 7


def test_a_wrong_field_would_be_found(rendered):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kubernetes_validate
    document = of_kind(rendered["cpu"], "Deployment")[0]
    broken = {**document, "spec": {**document["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_containers_run_without_rights_and_say_what_they_take(rendered, overlay):
    found = list(containers(rendered[overlay]))
    assert found
    for container in found:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]["memory"]
        assert container["resources"]["limits"]["memory"]
        assert ":latest" not in container["image"]
    for deployment in of_kind(rendered[overlay], "Deployment"):
        assert deployment["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_time_to_stop_covers_what_the_server_may_take(rendered, overlay):
    for deployment in of_kind(rendered[overlay], "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        options = dict(word.split("=") for word in container["args"] if "-secs=" in word)
        wait, run = (int(options[name]) for name in ("--drain-grace-secs", "--exit-timeout-secs"))
        assert wait > 0
        assert pod["terminationGracePeriodSeconds"] >= wait + run + 10


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_paths_that_the_server_has(rendered, overlay):
    expected = {"startupProbe": Endpoint.READY, "readinessProbe": Endpoint.READY, "livenessProbe": Endpoint.LIVE}
    for container in containers(rendered[overlay]):
        found = {probe: resolve(container[probe]["httpGet"]["path"]).endpoint for probe in expected}
        assert found == expected


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_servers_options_are_options(rendered, overlay, tmp_path):
    for container in containers(rendered[overlay]):
        configuration(container, tmp_path)


def test_a_replica_more_is_there_before_one_goes(rendered):
    (deployment,) = of_kind(rendered["cpu"], "Deployment")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert of_kind(rendered["cpu"], "PodDisruptionBudget")[0]["spec"]["maxUnavailable"] == 1


def test_the_canarys_pods_are_not_the_stable_ones(rendered):
    stable, canary = sorted(of_kind(rendered["canary"], "Deployment"), key=lambda each: each["metadata"]["name"])
    assert stable["spec"]["selector"]["matchLabels"]["track"] == "stable"
    assert canary["spec"]["selector"]["matchLabels"]["track"] == "canary"
    for deployment in (stable, canary):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
        service = of_kind(rendered["canary"], "Service")[0]["spec"]["selector"]
        assert service.items() <= labels.items()


def test_the_gpu_is_asked_for_and_the_autoscaler_by_processor_gone(rendered):
    (container,) = containers(rendered["gpu"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert not of_kind(rendered["gpu"], "HorizontalPodAutoscaler")
    (autoscaler,) = of_kind(rendered["cpu"], "HorizontalPodAutoscaler")
    assert autoscaler["spec"]["metrics"][0]["resource"]["name"] == "cpu"


def test_replicas_follow_the_metric_that_the_adapter_makes(rendered):
    (autoscaler,) = of_kind(rendered["monitoring"], "HorizontalPodAutoscaler")
    rules = yaml.safe_load((ROOT / "deploy/kubernetes/overlays/monitoring/adapter-rules.yaml").read_text())
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rules["rules"]["custom"][0]["name"]["as"]


def test_the_operators_alerts_are_those_of_the_file(rendered):
    (rule,) = of_kind(rendered["monitoring"], "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())


def test_kserves_runtime_serves_where_kserve_looks(tmp_path):
    runtime = yaml.safe_load((ROOT / "deploy/kserve/runtime.yaml").read_text())
    (container,) = runtime["spec"]["containers"]
    config = configuration(container, tmp_path)
    assert config.http.port == container["ports"][0]["containerPort"] == 8080
    service = yaml.safe_load((ROOT / "deploy/kserve/inferenceservice.yaml").read_text())
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    formats = {each["name"] for each in runtime["spec"]["supportedModelFormats"]}
    assert service["spec"]["predictor"]["model"]["modelFormat"]["name"] in formats
