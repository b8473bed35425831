"""The OpenAPI document: complete beside the router, sound in itself, and its examples are what it says they are."""

import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import validate

from headrace.config import LogSettings
from headrace.gateway.http import errors, request_codec
from headrace.gateway.http.openapi.bodies import schemas
from headrace.gateway.http.openapi.document import KINDS, document
from headrace.gateway.http.openapi.operations import OPERATIONS
from headrace.gateway.http.openapi.parts import FAILURES
from headrace.gateway.http.routes import PATHS, Endpoint
from headrace.gateway.restricted import KINDS as RESTRICTED
from headrace.observability.logging import LogControl
from headrace.observability.trace_settings import Sampler, TraceValues, shown
from headrace.repository.proto_json import to_dict
from headrace_protocol._generated import grpc_service_pb2, model_config_pb2

DOCUMENT = document()
SOURCES = Path(errors.__file__).parent
OF_ANY_PATH = {404, 405, 505}
"""Statuses that come before it is known which operation was meant."""


def walk(value):
    """Yield every object in a document."""
    if isinstance(value, dict):
        yield value
        value = value.values()
    if not isinstance(value, str | int | float | bool | None):
        for member in value:
            yield from walk(member)


def operations():
    return [
        pytest.param(path, method, operation, id=f"{method.upper()} {path}")
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    ]


def check(value, schema):
    """Raise where a value does not fit a schema of the document."""
    jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(value)


def test_every_method_of_every_endpoint_is_described_and_nothing_else():
    assert set(OPERATIONS) == {(endpoint, method) for endpoint in Endpoint for method in endpoint.methods}


def test_every_path_of_the_router_is_in_the_document_with_its_methods():
    described = {path: {method.upper() for method in methods} for path, methods in DOCUMENT["paths"].items()}

    assert described == {path: set(endpoint.methods) for path, endpoint in PATHS.items()}


def test_the_document_is_valid_openapi():
    validate(DOCUMENT)


def test_every_reference_leads_somewhere():
    for found in walk(DOCUMENT):
        if "$ref" in found:
            target = DOCUMENT
            for step in found["$ref"].removeprefix("#/").split("/"):
                assert step in target, found["$ref"]
                target = target[step]


def test_no_schema_is_there_that_nothing_refers_to():
    used = {found["$ref"].rpartition("/")[2] for found in walk(DOCUMENT) if "$ref" in found}

    assert set(schemas()) <= used


def test_operations_have_names_of_their_own():
    names = [operation.values[2]["operationId"] for operation in operations()]

    assert len(names) == len(set(names))


@pytest.mark.parametrize(("path", "method", "operation"), operations())
def test_an_operation_declares_the_parameters_of_its_path(path, method, operation):
    declared = [parameter["$ref"].rpartition("/")[2] for parameter in operation["parameters"]]

    assert [name for name in declared if name.islower() and f"{{{name}}}" in path] == re.findall(r"\{(\w+)\}", path)


@pytest.mark.parametrize(("path", "method", "operation"), operations())
def test_an_operation_is_tagged_with_the_kind_by_which_it_can_be_restricted(path, method, operation):
    assert operation["tags"] == [PATHS[path].kind]


@pytest.mark.parametrize(("path", "method", "operation"), operations())
def test_the_examples_of_an_operation_fit_their_schemas(path, method, operation):
    for content in (operation.get("requestBody", {}), *operation["responses"].values()):
        for media in content.get("content", {}).values():
            if "example" in media:
                check(media["example"], media["schema"])
            for example in media.get("examples", {}).values():
                check(example["value"], media["schema"])


def test_kinds_are_those_that_can_be_restricted():
    assert tuple(KINDS) == RESTRICTED


def test_a_restricted_kind_tells_the_header_that_is_wanted():
    restricted = document({"model-repository": "admin-key"})
    operation = restricted["paths"]["/v2/repository/index"]["post"]

    assert operation["security"] == [{"model-repository": []}]
    assert restricted["components"]["securitySchemes"]["model-repository"]["name"] == "admin-key"
    assert "security" not in restricted["paths"]["/v2"]["get"]


def test_every_status_that_the_door_answers_with_is_in_the_document():
    raised = {
        int(status)
        for path in SOURCES.glob("*.py")
        for status in re.findall(r"HttpError\(\s*(\d{3})", path.read_text())
    }

    assert {404, 405, 415} <= raised
    assert (raised | set(errors.STATUS.values())) - OF_ANY_PATH <= set(FAILURES)


@pytest.mark.parametrize(
    ("name", "struct"),
    [
        ("InferRequest", request_codec._Request),
        ("InferInput", request_codec._Input),
        ("InferRequestedOutput", request_codec._Output),
    ],
)
def test_a_schema_of_the_request_has_the_members_that_are_read(name, struct):
    assert set(schemas()[name]["properties"]) == {field.encode_name for field in msgspec.structs.fields(struct)}
    assert set(schemas()[name]["required"]) == {
        field.encode_name for field in msgspec.structs.fields(struct) if field.required
    }


@pytest.mark.parametrize(
    "message",
    [
        model_config_pb2.ModelConfig(),
        model_config_pb2.ModelConfig(
            name="m",
            dynamic_batching=model_config_pb2.ModelDynamicBatching(preferred_batch_size=[4]),
            parameters={"a": model_config_pb2.ModelParameter(string_value="b")},
            input=[model_config_pb2.ModelInput(name="i", data_type=model_config_pb2.TYPE_FP32, dims=[-1])],
        ),
        grpc_service_pb2.ModelStatisticsResponse(
            model_stats=[
                grpc_service_pb2.ModelStatistics(
                    name="m",
                    last_inference=2**63,
                    inference_stats=grpc_service_pb2.InferStatistics(
                        success=grpc_service_pb2.StatisticDuration(count=1, ns=2**40)
                    ),
                    response_stats={"0": grpc_service_pb2.InferResponseStatistics()},
                )
            ]
        ),
    ],
    ids=["empty configuration", "configuration", "statistics"],
)
def test_a_message_is_printed_as_its_schema_says(message):
    check(json.loads(json.dumps(to_dict(message))), schemas()[message.DESCRIPTOR.name])


def test_a_member_that_a_message_lacks_is_not_in_its_schema():
    with pytest.raises(jsonschema.ValidationError, match="'speed' was unexpected"):
        check({**to_dict(model_config_pb2.ModelConfig()), "speed": 1}, schemas()["ModelConfig"])


def test_trace_settings_are_shown_as_their_schema_says():
    check(shown(Sampler(TraceValues(("TIMESTAMPS", "TENSORS"), 1, 7)), "/traces"), schemas()["TraceSettings"])
    check(shown(Sampler(TraceValues()), ""), schemas()["TraceSettings"])


def test_log_settings_are_shown_as_their_schema_says():
    check(
        LogControl(LogSettings(verbose=1, info=True, warning=True, error=False, format="json", file="")).get(),
        schemas()["LogSettings"],
    )


@pytest.mark.parametrize(
    "tensor",
    [
        {"name": "a", "shape": [1], "datatype": "FP32"},
        {"name": "a", "shape": [1], "datatype": "FP32", "data": [1], "parameters": {"binary_data_size": 4}},
        {
            "name": "a",
            "shape": [1],
            "datatype": "FP32",
            "parameters": {"binary_data_size": 4, "shared_memory_region": "r"},
        },
        {"name": "a", "shape": [1], "datatype": "FP32", "parameters": {"shared_memory_region": "r"}},
        {"name": "a", "shape": [1], "datatype": "FP32", "data": [1], "parameters": {"shared_memory_offset": 4}},
        {"name": "a", "shape": [-1], "datatype": "FP32", "data": [1]},
        {"name": "a", "shape": [1], "datatype": "FLOAT", "data": [1]},
        {"name": "a", "shape": [1], "datatype": "FP32", "data": [{}]},
    ],
    ids=[
        "without data",
        "data twice",
        "binary and in a region",
        "region without a size",
        "offset without a region",
        "negative shape",
        "unknown datatype",
        "object as element",
    ],
)
def test_an_input_that_the_server_refuses_does_not_fit_the_schema(tensor):
    with pytest.raises(jsonschema.ValidationError):
        check(tensor, schemas()["InferInput"])
