"""The project's own promises about its files: source roots, entry points, versions, links, samples."""

import json
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from google.protobuf import text_format

import headrace
from headrace.flags import FLAGS
from headrace.gateway.http.openapi.bodies import schemas
from headrace.gateway.http.routes import PATHS
from headrace_protocol._generated import grpc_service_pb2
from headrace_protocol._generated import model_config_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("protos", "server", "backends", "model_repository", "deploy", "tests", "docs", ".ci")
MODELS = sorted(path.parent.name for path in ROOT.glob("model_repository/*/config.pbtxt"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])

MARKDOWN_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MARKDOWN_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH_OF_A_MACHINE = re.compile(rb"(?<![\w.])/(?:home|root|Users|work)/\w")


def project_files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file())
    for folder in FOLDERS:
        yield from (
            path for path in ROOT.joinpath(folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
        )


def anchors(document: Path) -> set[str]:
    headings = MARKDOWN_HEADING.findall(CODE_BLOCK.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("root", ["protos", "server", "backends"])
def test_a_source_root_is_a_folder_and_not_a_package(root):
    packages = [path.parent.name for path in (ROOT / root).glob("*/__init__.py")]

    assert not (ROOT / root / "__init__.py").exists()
    assert len(packages) == 1
    assert f"{root}/{packages[0]}" in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.mark.parametrize("name", PROJECT["project"]["entry-points"]["headrace.backends"])
def test_a_backend_entry_point_is_installed_and_names_a_class(name):
    (entry_point,) = entry_points(group="headrace.backends", name=name)

    assert isinstance(entry_point.load(), type)


def test_the_package_and_pyproject_have_one_version():
    assert headrace.__version__ == PROJECT["project"]["version"]


def test_the_changelog_has_a_section_for_the_version():
    assert f"\n## [{headrace.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_of_a_document_leads_somewhere(document):
    broken = []
    for link in MARKDOWN_LINK.findall(CODE_BLOCK.sub("", document.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)

    assert not broken


@pytest.mark.parametrize("name", FLAGS)
def test_compatibility_tells_of_every_option(name):
    assert f"`--{name}`" in (ROOT / "docs/compatibility.md").read_text()


@pytest.mark.parametrize("rpc", grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name)
def test_compatibility_tells_of_every_rpc(rpc):
    assert f"`{rpc}`" in (ROOT / "docs/compatibility.md").read_text()


@pytest.mark.parametrize("file", [grpc_service_pb2, pb], ids=["grpc_service", "model_config"])
def test_compatibility_tells_of_every_field_of_every_message(file):
    text = (ROOT / "docs/compatibility.md").read_text()
    messages = list(file.DESCRIPTOR.message_types_by_name.values())
    for message in messages:
        messages += [inner for inner in message.nested_types if not inner.GetOptions().map_entry]

    assert not [field.full_name for m in messages for field in m.fields if f"`{field.name}`" not in text]


@pytest.mark.parametrize(
    ("method", "path"), [(method, path) for path, endpoint in PATHS.items() for method in endpoint.methods]
)
def test_compatibility_tells_of_every_endpoint(method, path):
    named = path.replace("{model}/versions/{version}", "{m}")

    text = (ROOT / "docs/compatibility.md").read_text()
    assert f"`{method} {named}`" in text or f"`{method} {named.replace('{model}', '{m}')}`" in text


@pytest.mark.parametrize("name", [name for name in schemas() if name.endswith(("Request", "Parameters", "Settings"))])
def test_compatibility_tells_of_every_member_of_a_json_body(name):
    text = (ROOT / "docs/compatibility.md").read_text()

    assert not [member for member in schemas()[name].get("properties", ()) if f"`{member}`" not in text]


def test_no_file_names_a_path_of_somebody_s_machine():
    found = [
        path.relative_to(ROOT).as_posix() for path in project_files() if PATH_OF_A_MACHINE.search(path.read_bytes())
    ]

    assert not found


def test_the_sample_repository_has_the_models_of_the_readme():
    assert MODELS == ["add_sub_python", "digits", "double", "identity", "repeat", "simple"]


@pytest.mark.parametrize("model", MODELS)
def test_a_sample_model_has_a_configuration_that_parses_and_bears_its_name(model):
    folder = ROOT / "model_repository" / model
    config = text_format.Parse((folder / "config.pbtxt").read_text(), pb.ModelConfig())

    assert config.name == model
    assert (folder / "1").is_dir()


def test_identity_has_an_optional_input_and_an_output_for_every_datatype():
    config = text_format.Parse((ROOT / "model_repository/identity/config.pbtxt").read_text(), pb.ModelConfig())
    datatypes = set(pb.DataType.values()) - {pb.TYPE_INVALID}

    assert {tensor.data_type for tensor in config.input if tensor.optional} == datatypes
    assert {tensor.data_type for tensor in config.output} == datatypes


def test_the_first_request_of_the_readme_holds_as_many_pixels_as_the_model_takes():
    config = text_format.Parse((ROOT / "model_repository/digits/config.pbtxt").read_text(), pb.ModelConfig())
    (image,) = json.loads((ROOT / "docs/first-request.json").read_text())["inputs"]

    assert image["name"] == config.input[0].name
    assert image["shape"] == [1, *config.input[0].dims]
    assert len(image["data"]) == config.input[0].dims[0]


def test_every_score_of_the_digits_model_has_a_label():
    config = text_format.Parse((ROOT / "model_repository/digits/config.pbtxt").read_text(), pb.ModelConfig())
    labels = (ROOT / "model_repository/digits" / config.output[0].label_filename).read_text().splitlines()

    assert len(labels) == config.output[0].dims[0]
