"""Writes the dashboards beside it: python deploy/grafana/dashboards.py. A panel is a title, a unit and its queries."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
Panel = tuple[str, str, Sequence[tuple[str, str]]]
"""Title, unit, and queries with the legend of each."""

_OF_MODEL = 'model=~"$model"'
_LATENCY = "histogram_quantile({q}, sum by (model, le) (rate(headrace_{what}_duration_seconds_bucket{{{of}}}[$__rate_interval])))"


def _quantiles(what: str) -> list[tuple[str, str]]:
    return [
        (_LATENCY.format(q=q, what=what, of=_OF_MODEL), f"{{{{model}}}} p{name}")
        for q, name in (("0.5", "50"), ("0.99", "99"))
    ]


def _rate(metric: str, by: str = "model", of: str = _OF_MODEL) -> str:
    return f"sum by ({by}) (rate({metric}{{{of}}}[$__rate_interval]))"


def _llm_quantiles(metric: str) -> list[tuple[str, str]]:
    inner = f"sum by (model, le) (rate(headrace_llm_{metric}_bucket{{{_OF_MODEL}}}[$__rate_interval]))"
    return [
        (f"histogram_quantile({q}, {inner})", f"{{{{model}}}} p{name}") for q, name in (("0.5", "50"), ("0.99", "99"))
    ]


_FAILED = _rate("nv_inference_request_failure", "model, version")
_FAILED_PART = f"{_FAILED} / ({_rate('nv_inference_request_success', 'model, version')} + {_FAILED} > 0)"

OVERVIEW: Sequence[Panel] = (
    ("Requests a second", "reqps", [(_rate("nv_inference_request_success"), "{{model}}")]),
    ("Failures a second", "reqps", [(_rate("nv_inference_request_failure", "model, reason"), "{{model}} {{reason}}")]),
    ("Time of requests", "s", _quantiles("request")),
    ("Models that would serve now", "short", [("sum by (instance) (headrace_model_ready)", "{{instance}}")]),
    ("Restarts of backends, last hour", "short", [("sum by (model) (increase(headrace_backend_restarts_total[1h]))", "{{model}}")]),
    ("Waiting requests", "short", [(f"sum by (model) (headrace_queue_depth{{{_OF_MODEL}}})", "{{model}}")]),
    ("Processor of the server and its machine", "percentunit", [
        ("rate(process_cpu_seconds_total[$__rate_interval])", "server {{instance}}"),
        ("nv_cpu_utilization", "machine {{instance}}"),
    ]),
    ("Memory", "bytes", [
        ("process_resident_memory_bytes", "server {{instance}}"),
        ('sum by (instance) (headrace_backend_memory_bytes{kind="pss"})', "backends {{instance}}"),
    ]),
)  # fmt: skip
MODEL: Sequence[Panel] = (
    ("Requests a second", "reqps", [(_rate("nv_inference_request_success", "model, version"), "{{model}} {{version}}")]),
    ("Failed part", "percentunit", [(_FAILED_PART, "{{model}} {{version}}")]),
    ("Whole time", "s", _quantiles("request")),
    ("Time in the queue", "s", _quantiles("queue")),
    ("Time in the model", "s", _quantiles("compute")),
    ("Rows a batch", "short", [(f"{_rate('nv_inference_count')} / ({_rate('nv_inference_exec_count')} > 0)", "{{model}}")]),
    ("Batches a second", "ops", [(_rate("nv_inference_exec_count"), "{{model}}")]),
    ("Where the time goes", "s", [
        (f"{_rate(f'nv_inference_{part}_duration_us')} / 1e6 / ({_rate('nv_inference_request_success')} > 0)", f"{{{{model}}}} {part}")
        for part in ("queue", "compute_input", "compute_infer", "compute_output")
    ]),
    ("Bytes of tensors copied", "Bps", [(_rate("headrace_tensor_bytes_copied_total", "model, direction"), "{{model}} {{direction}}")]),
    ("Processor of its processes", "percentunit", [(_rate("headrace_backend_cpu_seconds_total", "model, process"), "{{model}} {{process}}")]),
    ("Memory of its processes", "bytes", [(
        f'sum by (model, process) (headrace_backend_memory_bytes{{kind="pss", {_OF_MODEL}}})', "{{model}} {{process}}",
    )]),
)  # fmt: skip
LLM: Sequence[Panel] = (
    ("Time to the first token", "s", _llm_quantiles("time_to_first_token_seconds")),
    ("Time between tokens", "s", _llm_quantiles("inter_token_latency_seconds")),
    ("Whole time of a generation", "s", _llm_quantiles("e2e_request_latency_seconds")),
    ("Time in the engine's queue", "s", _llm_quantiles("request_queue_time_seconds")),
    ("Tokens a second", "short", [
        (_rate("headrace_llm_generation_tokens_total"), "{{model}} generated"),
        (_rate("headrace_llm_prompt_tokens_total"), "{{model}} prompt"),
    ]),
    ("Generations", "short", [
        (f"sum by (model) (headrace_llm_num_requests_running{{{_OF_MODEL}}})", "{{model}} running"),
        (f"sum by (model) (headrace_llm_num_requests_waiting{{{_OF_MODEL}}})", "{{model}} waiting"),
    ]),
    ("KV cache in use", "percentunit", [(f"max by (model) (headrace_llm_kv_cache_usage_perc{{{_OF_MODEL}}})", "{{model}}")]),
    ("Part of prompts found in the prefix cache", "percentunit", [(
        f"{_rate('headrace_llm_prompt_tokens_cached_total')} / ({_rate('headrace_llm_prompt_tokens_total')} > 0)", "{{model}}",
    )]),
    ("Ends of generations a second", "ops", [
        (_rate("headrace_llm_request_success_total", "model, finished_reason"), "{{model}} {{finished_reason}}"),
    ]),
    ("Preemptions and refusals a second", "ops", [
        (_rate("headrace_llm_num_preemptions_total"), "{{model}} preempted"),
        (_rate("headrace_llm_admission_rejections_total"), "{{model}} refused"),
    ]),
)  # fmt: skip
CAPACITY: Sequence[Panel] = (
    ("Busy part of a model's process", "percentunit", [(_rate("headrace_backend_cpu_seconds_total"), "{{model}}")]),
    ("Part of the time that requests wait", "percentunit", [(
        f"{_rate('nv_inference_queue_duration_us')} / ({_rate('nv_inference_request_duration_us')} > 0)", "{{model}}",
    )]),
    ("Requests refused for want of room", "reqps", [(_rate("nv_inference_request_failure", of=f'{_OF_MODEL}, reason="REJECTED"'), "{{model}}")]),
    ("Memory of the machine in use", "percentunit", [("nv_cpu_memory_used_bytes / nv_cpu_memory_total_bytes", "{{instance}}")]),
    ("Descriptors in use", "percentunit", [("process_open_fds / process_max_fds", "{{instance}}")]),
    ("Memory a model", "bytes", [(f'sum by (model) (headrace_backend_memory_bytes{{kind="pss", {_OF_MODEL}}})', "{{model}}")]),
    ("Requests a second of one CPU second", "short", [(
        f"{_rate('nv_inference_request_success')} / ({_rate('headrace_backend_cpu_seconds_total')} > 0)", "{{model}}",
    )]),
    ("Time to load", "s", [(f"nv_model_load_duration_secs{{{_OF_MODEL}}}", "{{model}} {{version}}")]),
)  # fmt: skip
DASHBOARDS = {"overview": OVERVIEW, "model": MODEL, "llm": LLM, "capacity": CAPACITY}


def dashboard(name: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """Return a dashboard as Grafana has it: two panels a row, and the model as a variable."""
    return {
        "uid": f"headrace-{name}",
        "title": f"headrace {name}",
        "tags": ["headrace"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}},
                {
                    "name": "model",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": "label_values(headrace_model_ready, model)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [_panel(at, *panel) for at, panel in enumerate(panels)],
    }


def _panel(at: int, title: str, unit: str, queries: Sequence[tuple[str, str]]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": at + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (at % 2), "y": 8 * (at // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": source, "expr": expr, "legendFormat": legend}
            for number, (expr, legend) in enumerate(queries)
        ],
    }


def write() -> None:
    """Write every dashboard."""
    FOLDER.mkdir(exist_ok=True)
    for name, panels in DASHBOARDS.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(dashboard(name, panels), indent=2) + "\n")


if __name__ == "__main__":
    write()
