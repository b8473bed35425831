"""What servers of this kind got wrong in the field, and which tests here would notice.

Each fault is told in a sentence, with the points that a server has to get right and the tests of each: a function, as
`<file below tests>::<name>`, or rows of the protocol's table, as `table:<how their names begin>`.
"""

from __future__ import annotations

from conformance.pitfall import Pitfall
from conformance.pitfalls_of_language_models import LANGUAGE_PITFALLS
from conformance.pitfalls_of_models import MODEL_PITFALLS

BACKEND_FAULTS = "chaos/test_backend_faults.py::"
ARCHIVES = "unit/test_archives.py::"
MODELS = "conformance/test_model_pitfalls.py::"
ENSEMBLES = "integration/test_ensembles.py::"
PYTHON = "integration/test_python_models.py::"
MEMORY_CHAOS = "chaos/test_shared_memory.py::"

HTTP_AND_TENSORS = [
    Pitfall(
        "HTTP, JSON and binary tensors",
        "a member of the JSON that is of the wrong kind ends the process",
        {
            "shape": ('table:shape "-1" of an input', "table:shape {} ", "table:shape [1.5]", "table:shape [null]"),
            "data": ("table:data {} ", "table:data [[1], {}]", "table:the report's own case"),
            "inputs and outputs": ("table:inputs {} ", "table:inputs [7]", "table:inputs [] ", 'table:outputs "x"'),
            "parameters and id": ("table:parameters [] of the request", "table:id 5 of the request"),
            "a body that is no request": (
                *("table:the body b'[]'", "table:the body b'null'", "table:the body b''", "table:a body cut to"),
                "property/test_http_fuzz.py::test_mutated_and_hostile_infer_bodies_never_hurt_the_server",
            ),
        },
    ),
    Pitfall(
        "HTTP, JSON and binary tensors",
        "a negative dimension in a request ends the process",
        {
            "one, or two whose product is right": (
                "table:negative dimension [-1, 4]",
                "table:negative dimension [-1, -4]",
            ),
            "the smallest of all": ("table:negative dimension [-9223372036854775808, 1]",),
            "beside a zero": ("table:negative dimension [0, -1]", "table:negative dimension [-1, 0]"),
            "on a stream": ("table:a negative dimension on a stream",),
        },
    ),
    Pitfall(
        "HTTP, JSON and binary tensors",
        "the length of the header, the sizes of the inputs and the body contradict each other",
        {
            "the header length": (
                *(
                    "table:no header length",
                    "table:header length 0",
                    "table:header length -1",
                    "table:header length 'abc'",
                ),
                *("table:header length '1e3'", "table:a header length one beyond the body"),
                "table:a header length one less than the JSON",
            ),
            "the size of an input": (
                *("table:binary_data_size 15", "table:binary_data_size 17", "table:binary_data_size -16"),
                *("table:binary_data_size '16'", "table:binary_data_size 9223372036854775808"),
            ),
            "two sources": ("table:data and binary_data_size",),
            "sums": ("table:two inputs that claim more", "table:one byte that nobody claims"),
        },
    ),
    Pitfall(
        "HTTP, JSON and binary tensors",
        "an answer is compressed and does not say so",
        {
            "if and only if": (
                "conformance/test_http_codings.py::test_an_answer_is_encoded_if_and_only_if_it_says_so",
                "e2e/test_stock_clients.py::test_http_compression_both_ways",
            ),
            "errors": ("conformance/test_http_codings.py::test_errors_are_encoded_as_asked_too",),
            "an unknown coding": ("table:Content-Encoding: br", "table:Content-Encoding: gzip, gzip"),
            "the header length": (
                "conformance/test_http_codings.py::test_the_header_length_counts_the_json_before_compression",
            ),
        },
    ),
    Pitfall(
        "HTTP, JSON and binary tensors",
        "half precision has no form in JSON, and numbers are made of it nevertheless",
        {
            "in": ("table:FP16 as text", "table:BF16 as text"),
            "out": ("table:FP16 asked for as text", "table:BF16 asked for as text"),
            "and in binary it is right": ("table:FP16 binary", "table:BF16 binary"),
        },
    ),
    Pitfall(
        "HTTP, JSON and binary tensors",
        "integers beyond their datatype wrap in silence",
        {
            "small ones": ("table:257 for UINT8", "table:-129 for INT8", "table:'-1' of int for UINT64"),
            "large ones": (
                "table:'18446744073709551616' of int for UINT64",
                "table:'9223372036854775808' of int for INT64",
            ),
            "what is no integer": ("table:'1.5' of float for INT32", "table:'2' of int for BOOL"),
            "outputs of a model": (
                BACKEND_FAULTS + "test_an_answer_that_breaks_the_configuration_is_an_error_for_that_request_alone",
                PYTHON + "test_what_a_model_does_wrongly_is_named_in_the_error",
            ),
            "every digit": ("table:INT64 text identity [7]", "table:UINT64 text identity [7]"),
        },
    ),
    Pitfall(
        "HTTP, JSON and binary tensors",
        "strings of one client end up in those of another under load",
        {
            "32 clients with strings of every length": (
                "integration/test_batching.py::test_strings_stay_whole_under_load",
                ENSEMBLES + "test_strings_of_many_clients_keep_every_byte",
                MODELS + "test_strings_of_many_clients_stay_whole_through_two_python_models",
                "property/test_http_fuzz.py::test_strings_survive_json_both_ways_byte_by_byte",
            ),
        },
    ),
    Pitfall(
        "HTTP, JSON and binary tensors",
        "tensors without elements end the process",
        {
            "numbers": (
                "table:FP32 text identity [0]",
                "table:FP32 binary plane [2, 0]",
                "table:FP32 text plane [0, 3]",
            ),
            "strings": (
                "table:BYTES text identity [0]",
                "table:BYTES binary plane [2, 0]",
                "table:BYTES text plane [0, 3]",
            ),
            "in the models' frameworks": (
                "e2e/test_empty_tensors.py::test_no_elements_come_back_as_no_elements",
                "e2e/test_empty_tensors.py::test_an_output_that_turns_out_empty_is_an_answer",
                "e2e/test_torch_models.py::test_no_elements_come_back_as_no_elements",
                PYTHON + "test_every_type_comes_back_as_it_went",
                MODELS + "test_a_python_model_may_answer_with_no_elements",
            ),
            "a batch of nothing": ("table:a batch of nothing",),
            "dimensions that no array can have beside the 0": ("table:a huge dimension beside a zero",),
        },
    ),
    Pitfall(
        "HTTP, JSON and binary tensors",
        "what the client did not send comes back as null",
        {
            "absent in, absent out": (
                "table:an answer without id, parameters and more",
                "table:null for what may be absent",
            ),
            "present in, the same out": ("table:an empty id comes back", "table:an id beyond ASCII comes back"),
        },
    ),
]

GRPC = [
    Pitfall(
        "gRPC",
        "raw and typed contents are mixed, and one tensor is read as another",
        {
            "of two inputs": ("table:raw for one input, typed for the other",),
            "of one input": ("table:raw and typed on the same input",),
            "too few and too many": ("table:one raw entry for two inputs", "table:three raw entries for two inputs"),
            "of another datatype": ("table:fp32_contents for INT64", "table:typed contents of another datatype"),
            "beyond the datatype": ("table:257 for UINT8", "table:128 for INT8"),
            "an input in shared memory takes no entry": (
                "table:INPUT0 in a region, the other sent",
                "table:INPUT1 in a region, the other sent",
            ),
        },
    ),
    Pitfall(
        "gRPC",
        "a model that is not known, a version that is not and one that is not ready look the same",
        {
            "an unknown model": ("table:infer of an unknown model", "table:ready of an unknown model"),
            "an unknown version": ("table:infer of an unknown version", "table:ready of an unknown version"),
            "a load that is held": (
                "conformance/test_pitfalls.py::test_a_model_that_loads_is_unavailable_whether_asked_for_readiness_or_not",
            ),
            "a load that failed": (
                "table:infer of a model whose load failed",
                "table:infer of a model that was never loaded",
            ),
        },
    ),
    Pitfall(
        "gRPC",
        "a client that closes a streamed answer ends the server",
        {
            "again and again, by every way to go": (
                "chaos/test_streams.py::test_a_thousand_dropped_streams_leave_nothing_behind",
            ),
            "the model is told": (
                "chaos/test_streams.py::test_a_long_request_whose_client_has_gone_leaves_its_instance_to_the_next",
            ),
            "a deadline": ("chaos/test_streams.py::test_a_deadline_that_has_passed_leaves_the_instance_to_the_next",),
        },
    ),
]

SHARED_MEMORY = [
    Pitfall(
        "shared memory",
        "offsets and sizes of regions are added wrongly, and memory is touched that is nobody's",
        {
            "of a registration": (
                *("table:register 8193 bytes at 0", "table:register 8192 bytes at 4096", "table:register 0 bytes at 0"),
                *("table:register 1 bytes at 18446744073709551615", "table:register with offset -1"),
                *("table:register with byte_size -1", "table:register and see"),
            ),
            "of a tensor": (
                *("table:a region's own offset counts once", "table:both offsets count once each"),
                *("table:4092 + 8 of a region of 4096", "table:8 bytes at 9223372036854775808 of a region"),
            ),
            "against the shape": ("table:4 bytes for 2 elements", "table:12 bytes for 2 elements"),
            "outputs": ("table:4 bytes for an output of 8", "table:an output of 2 in 8 bytes at 16 of a region"),
            "an object that became smaller": (
                "table:a region whose object became smaller",
                MEMORY_CHAOS + "test_clients_that_cut_their_memory_at_any_time_get_answers_or_errors_and_harm_nobody",
            ),
        },
    ),
    Pitfall(
        "shared memory",
        "a client learns the name of the server's own memory and opens it",
        {
            "no name in a message, nor anywhere": (
                "conformance/test_pitfalls.py::test_failures_tell_no_name_of_memory_and_the_server_has_none",
            ),
            "reserved prefixes": ("table:a key of our own prefix", "table:a key of Triton's Python backend"),
            "a key is one name": (
                *("table:a key that leads out", "table:a key of one slash", "table:a key that is empty"),
                *("table:a key with a path", "table:a key of 300 characters", "table:a key with a NUL"),
            ),
            "only memory": (
                *("table:a key of a link to a file", "table:a key of a link to memory", "table:a key of a folder"),
                "table:a key of a pipe",
            ),
            "only of users that are allowed": ("unit/test_shared_memory.py",),
            "off unless the operator switches it on": ("table:register where shared memory is off",),
        },
    ),
]

SETTINGS = [
    Pitfall(
        "metrics, statistics, tracing",
        "a number too large in a call of the settings ends the server",
        {
            "trace settings": (
                *(
                    "table:trace_rate '10000000000'",
                    "table:trace_rate '-5'",
                    "table:trace_rate ''",
                    "table:trace_rate '1.5'",
                ),
                *("table:trace_level \"['NOPE']\"", "table:trace_file '/etc/x'"),
            ),
            "log settings": ("table:log_verbose_level -1 in JSON", "table:log_file '/etc/x'"),
            "fields of a request": (
                "table:timeout 18446744073709551616 in JSON",
                "table:priority 18446744073709551616 in JSON",
            ),
            "all or none": (
                "table:nothing changes where one setting is bad",
                "table:nothing changes where one log setting is bad",
            ),
        },
    ),
    Pitfall(
        "operations",
        "a client chooses the file of the log or of the traces, and what stands in it",
        {
            "no target by a call": (*("table:log_file '/tmp/x.sh'", "table:trace_file '/tmp/y'", "table:trace_mode"),),
            "one record a line, escaped": (
                "integration/test_settings.py::test_a_hostile_id_stays_on_its_line_of_the_log_and_of_the_traces",
            ),
            "odd names and parameters": (
                *("table:metadata of a name with a line end", "table:metadata of a name with a NUL"),
                "table:a parameter with an odd name",
            ),
        },
    ),
]

OPERATIONS = [
    Pitfall(
        "operations",
        "the server says that it is ready while models load, or when one it should serve is not there",
        {
            "ports are open and live from the first second": (
                "integration/test_operations.py::test_probes_are_answered_while_models_load",
            ),
            "a model that failed, strict or not": (
                "integration/test_operations.py::test_a_failed_model_stops_readiness_only_where_it_is_strict",
            ),
            "ready, not ready and live while the server goes": (
                "integration/test_drain.py::test_everything_is_served_between_not_ready_and_the_end",
            ),
        },
    ),
    Pitfall(
        "operations",
        "two servers share a port, and half of the answers come from the wrong one",
        {
            "the second one ends and says which port": (
                "integration/test_operations.py::test_a_taken_port_is_told_and_ends_the_start",
                "integration/test_addresses.py::test_a_second_server_on_the_same_socket_ends_at_once_and_the_first_goes_on",
            ),
            "one port for two doors": (
                "integration/test_operations.py::test_one_port_for_two_doors_is_refused_before_anything_starts",
            ),
            "a restart at once after a kill": (
                "integration/test_operations.py::test_a_killed_server_can_be_started_again_on_its_ports_at_once",
            ),
        },
    ),
]

SECURITY = [
    Pitfall(
        "security",
        "a load brings a file to a place outside its model",
        {
            "paths": (
                *(
                    "table:upload of '../../../../tmp/pwn'",
                    "table:upload of '/tmp/x'",
                    "table:upload of '1/../../../x'",
                ),
                "integration/test_model_uploads.py::test_a_path_out_of_the_version_folder_is_refused_before_any_write",
            ),
            "without a configuration": ("table:upload without a configuration",),
            "what is no base64": ("table:upload of '!!!'",),
            "the same file twice": (
                "integration/test_model_uploads.py::test_a_file_that_comes_twice_is_refused_or_taken_once",
            ),
            "two loads at once": (
                "integration/test_model_uploads.py::test_uploads_of_one_name_at_once_leave_one_model_and_its_files_alone",
            ),
            "nothing left": (
                "integration/test_model_uploads.py::test_an_uploaded_model_serves_and_its_files_go_with_it",
            ),
            "off unless the operator allows it": ("table:upload where it is not allowed",),
            "paths in the configuration": (
                "table:load with a configuration with a label file outside",
                "table:load with a configuration with a model file outside",
                "table:load with a configuration with a Python at",
            ),
        },
    ),
    Pitfall(
        "security",
        "a megabyte of brackets ends the process",
        {
            "in data": (
                "table:500000 arrays in data",
                "table:500000 objects in data",
                "table:500000 arrays that are not",
            ),
            "in parameters": ("table:500000 arrays in a parameter",),
            "in a load": (
                "table:500000 arrays for /v2/repository/models/simple/load",
                "table:500000 objects as parameters for",
                "table:load with a configuration nested deep",
            ),
            "in settings": ("table:trace settings with the body b'[[[[", "table:log settings with the body b'[[[["),
            "in generate": ("table:generate with 500000 arrays", "table:generate_stream with 500000 arrays"),
        },
    ),
    Pitfall(
        "security",
        "a small body inflates to more than the memory",
        {
            "gzip and deflate": (
                "table:200 MB of zeros in gzip",
                "conformance/test_http_codings.py::test_bad_compressed_bodies_are_refused_and_the_server_stays_well",
            ),
            "broken streams": ("table:gzip cut short", "table:gzip and more", "table:gzip in two members"),
            "deflate with and without its frame": ("table:a body in deflate", "table:deflate without its frame"),
            "one coding on another": ("table:Content-Encoding: gzip, gzip",),
            "gRPC": (
                "conformance/grpc/test_infer.py::test_messages_above_the_limit_are_refused_either_way",
                "conformance/test_pitfalls.py::test_a_compressed_message_that_is_broken_hurts_nobody",
            ),
            "loads": ("integration/test_repository_api.py::test_a_body_that_inflates_without_end_is_refused",),
        },
    ),
    Pitfall(
        "security",
        "a path in a call of another door leads to files of the machine",
        {
            "no call takes a path: a model is a name": (
                *("table:load of ../simple", "table:load of /etc", "table:load of '..'", "table:load of ..%2fsimple"),
                "table:metadata of a name that is a path",
            ),
            "no call takes a repository": ("table:load with a repository", "table:unload with a repository"),
            "archives": (
                ARCHIVES + "test_a_name_that_leads_elsewhere_is_refused",
                ARCHIVES + "test_links_devices_and_pipes_are_refused",
                ARCHIVES + "test_a_link_that_leads_out_or_is_followed_is_refused",
                ARCHIVES + "test_what_comes_out_is_bounded_however_small_the_archive",
                ARCHIVES + "test_only_a_regular_file_is_read",
            ),
        },
    ),
]

PITFALLS = [
    *HTTP_AND_TENSORS,
    *GRPC,
    *SHARED_MEMORY,
    *SETTINGS,
    *OPERATIONS,
    *SECURITY,
    *MODEL_PITFALLS,
    *LANGUAGE_PITFALLS,
]
