"""Server reflection: what the services of this server look like, told from the descriptors of our own pool.

Pure: one encoded question in, one encoded answer out. The two versions of the protocol differ in their name alone.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from headrace.gateway.grpc.errors import NUMBER
from headrace_protocol._generated import grpc_service_pb2, health_pb2, pool, reflection_pb2
from headrace_protocol._generated.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from headrace_protocol.errors import ErrorCode, invalid

MAX_QUESTION: Final = 65536
"""Bytes; an answer holds its question."""

_FILES: Final = (grpc_service_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
_SERVICES: Final = [service for file in _FILES for service in file.services_by_name.values()]
SERVICES: Final = tuple(sorted(service.full_name for service in _SERVICES))


def answer(data: bytes) -> bytes:
    """Return the encoded answer to an encoded ServerReflectionRequest.

    What is asked for and not there is part of the answer. Raises INVALID_ARG for what is no question, or too long a one.
    """
    if len(data) > MAX_QUESTION:
        raise invalid(f"a question has at most {MAX_QUESTION} bytes, got {len(data)}")
    try:
        question = ServerReflectionRequest.FromString(data)
    except DecodeError as error:
        raise invalid(f"the request is not a well-formed ServerReflectionRequest: {error}") from None
    response = ServerReflectionResponse(valid_host=question.host, original_request=question)
    try:
        _fill(response, question, pool.Default())
    except KeyError as error:
        response.error_response.error_code = NUMBER[ErrorCode.NOT_FOUND]
        response.error_response.error_message = f"there is no {error.args[0]}"
    return response.SerializeToString()


def _fill(response: ServerReflectionResponse, question: ServerReflectionRequest, known: DescriptorPool) -> None:
    match question.WhichOneof("message_request"):
        case "list_services":
            for name in SERVICES:
                response.list_services_response.service.add(name=name)
        case "file_by_filename":
            name = question.file_by_filename
            try:
                file = known.FindFileByName(name)
            except KeyError:
                raise KeyError(f"file '{name}'") from None
            _add_files(response, file)
        case "file_containing_symbol":
            _add_files(response, _file_of(question.file_containing_symbol, known))
        case "file_containing_extension":
            extension = question.file_containing_extension
            raise KeyError(f"extension {extension.extension_number} of '{extension.containing_type}'")
        case "all_extension_numbers_of_type":
            name = question.all_extension_numbers_of_type
            try:
                known.FindMessageTypeByName(name)
            except KeyError:
                raise KeyError(f"message '{name}'") from None
            response.all_extension_numbers_response.base_type_name = name
        case _:
            response.error_response.error_code = NUMBER[ErrorCode.INVALID_ARG]
            response.error_response.error_message = "the request asks for nothing"


def _file_of(symbol: str, known: DescriptorPool) -> FileDescriptor:
    """Return the file that declares `symbol`. Raises KeyError."""
    parent, _, method = symbol.rpartition(".")
    for service in _SERVICES:
        if symbol == service.full_name or (parent == service.full_name and method in service.methods_by_name):
            return service.file
    try:
        return known.FindFileContainingSymbol(symbol)
    except KeyError:
        raise KeyError(f"symbol '{symbol}'") from None


def _add_files(response: ServerReflectionResponse, file: FileDescriptor) -> None:
    """Add a file, then every file that it imports, however indirectly, once."""
    waiting = [file]
    added: set[str] = set()
    while waiting:
        next_file = waiting.pop(0)
        if next_file.name not in added:
            added.add(next_file.name)
            response.file_descriptor_response.file_descriptor_proto.append(next_file.serialized_pb)
            waiting += next_file.dependencies
