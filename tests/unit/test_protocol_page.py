"""docs/protocol.md is what the code says, and the reader of .proto files misses nothing of them."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from headrace_protocol._generated import grpc_service_pb2, health_pb2, model_config_pb2, reflection_pb2

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "grpc_service": grpc_service_pb2,
    "model_config": model_config_pb2,
    "health": health_pb2,
    "reflection": reflection_pb2,
}


def load(name):
    """Import a module of docs/, which is no package."""
    spec = spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


proto_source = load("proto_source")


def blocks_of(descriptor, prefix=""):
    """Yield (name, names and numbers of what is in it) of every message and enum below a descriptor."""
    for enum in descriptor.enum_types_by_name.values() if not prefix else descriptor.enum_types:
        yield f"{prefix}{enum.name}", {value.name: value.number for value in enum.values}
    for message in descriptor.message_types_by_name.values() if not prefix else descriptor.nested_types:
        if not message.GetOptions().map_entry:
            yield f"{prefix}{message.name}", {field.name: field.number for field in message.fields}
            yield from blocks_of(message, f"{prefix}{message.name}.")


def test_the_page_is_what_the_code_says():
    result = subprocess.run(
        [sys.executable, ROOT / "docs" / "protocol_page.py", "--check"], capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", FILES)
def test_every_message_and_enum_of_a_proto_file_is_read_with_all_that_is_in_it(name):
    blocks = [block for block in proto_source.read(ROOT / "protos" / f"{name}.proto") if block.keyword != "service"]

    assert {block.name: {line.name: line.number for line in block.lines} for block in blocks} == dict(
        blocks_of(FILES[name].DESCRIPTOR)
    )


@pytest.mark.parametrize("name", FILES)
def test_every_rpc_of_a_proto_file_is_read(name):
    blocks = [block for block in proto_source.read(ROOT / "protos" / f"{name}.proto") if block.keyword == "service"]

    assert {block.name: [line.name for line in block.lines] for block in blocks} == {
        service.name: [method.name for method in service.methods]
        for service in FILES[name].DESCRIPTOR.services_by_name.values()
    }


def test_a_line_that_the_reader_does_not_know_is_an_error(tmp_path):
    path = tmp_path / "odd.proto"
    path.write_text("message Odd {\n  extensions 100 to 199;\n}\n")

    with pytest.raises(ValueError, match="odd.proto:2: unknown declaration"):
        proto_source.read(path)
