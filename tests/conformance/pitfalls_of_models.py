"""What servers of this kind got wrong with models: their configurations, loads, schedulers and processes."""

from __future__ import annotations

from conformance.pitfall import Pitfall

RELOADED = "integration/test_environments.py::"
UNLIKE = "integration/test_unlike_shapes.py::"
SEQUENCE_DRIVER = "unit/test_sequence_driver.py::"
BACKEND_CHAOS = "chaos/test_backends.py::"
MODELS = "conformance/test_model_pitfalls.py::"
CONFIGURATIONS = "e2e/test_configurations.py::"
CHANGES = "e2e/test_repository_changes.py::"
ROLLOUT = "integration/test_rollout.py::"
ENSEMBLES = "integration/test_ensembles.py::"
CACHE = "integration/test_response_cache.py::"
STATISTICS = "integration/test_exact_statistics.py::"
PYTHON = "integration/test_python_models.py::"
PYTHON_CALLS = "integration/test_python_calls.py::"
BATCHING = "integration/test_batching.py::"

UNLIKE_REQUESTS = [
    Pitfall(
        "schedulers",
        "requests of unlike shapes are joined, and one client gets the rows of another",
        {
            "never in one execution, and nobody waits for the full delay": (
                UNLIKE + "test_unlike_shapes_are_never_in_one_execution_and_do_not_wait_for_each_other",
            ),
            "an optional input that half of them leave out": (
                UNLIKE + "test_requests_that_leave_an_optional_input_out_are_not_mixed_with_those_that_give_it",
            ),
            "ragged: together, and each gets its own": (
                UNLIKE + "test_ragged_requests_share_an_execution_and_each_gets_its_own",
                UNLIKE + "test_a_model_is_told_where_ragged_requests_end_and_its_outputs_are_shared_out",
                UNLIKE + "test_a_python_model_sees_each_ragged_request_in_its_own_shape_and_the_inputs_that_came",
            ),
            "padded: the same": (UNLIKE + "test_padded_requests_share_an_execution_and_get_back_their_own_length",),
        },
    ),
]

ENVIRONMENTS = [
    Pitfall(
        "repository, load and unload",
        "a model that is loaded again runs in the Python environment of before",
        {
            "an archive replaced at its path": (
                RELOADED + "test_an_archive_that_is_replaced_at_its_path_is_what_runs_after_a_load",
                "unit/test_environment.py::test_other_content_at_the_same_path_is_another_environment",
            ),
            "a folder in which packages come and go": (
                "unit/test_environment.py::test_a_change_of_the_environment_is_a_change_of_the_model",
            ),
        },
    ),
]

SEQUENCES = [
    Pitfall(
        "schedulers",
        "a sequence that is cancelled frees its slot twice, and two others get one state",
        {
            "the report's own case, at both doors and for each strategy": (
                "chaos/test_sequences.py::test_a_cancelled_sequence_frees_its_slot_once",
            ),
            "at every moment, with idle time, restarts and lost processes": (
                "chaos/test_sequences.py::test_a_storm_never_mixes_sums_and_leaves_no_sequence_behind",
            ),
            "while one of its requests runs": (
                SEQUENCE_DRIVER
                + "test_cancelling_a_request_cancels_what_waits_of_its_sequence_and_frees_the_slot_once",
            ),
            "the state of one is never what another begins with": (
                "unit/test_backend_sequences.py::test_nothing_is_kept_of_sequences_that_are_over",
            ),
        },
    ),
]

CONFIGURATION = [
    Pitfall(
        "config.pbtxt and auto-complete",
        "a scalar fits no configuration, and users edit their models",
        {
            "without a configuration, and as one element with a reshape": (
                CONFIGURATIONS + "test_one_element_of_rank_0",
                CONFIGURATIONS + "test_a_scalar_of_two_elements_is_refused_with_what_fits",
            ),
            "no dims at all": (CONFIGURATIONS + "test_no_dims_at_all_are_refused_with_the_way_to_write_a_scalar",),
            "one number an item, in and out": (
                CONFIGURATIONS + "test_one_number_an_item_out_of_a_batch",
                CONFIGURATIONS + "test_one_number_an_item_is_found_without_a_configuration",
                CONFIGURATIONS + "test_one_number_an_item_into_a_batch",
            ),
        },
    ),
    Pitfall(
        "config.pbtxt and auto-complete",
        "completion switches on what nobody asked for",
        {
            "what is written wins, for each way to write it": (CONFIGURATIONS + "test_what_the_user_wrote_wins",),
            "an explicit 0 stays": (
                "unit/test_auto_complete.py::test_an_explicit_max_batch_size_of_zero_keeps_the_first_dimension",
            ),
            "the default size counts before preferred sizes are checked": (
                "unit/test_config_loading.py::test_the_default_max_batch_size_counts_before_preferred_sizes_are_checked",
            ),
            "batching without the dynamic batcher": (
                "unit/test_config_loading.py::test_batching_without_the_dynamic_batcher_is_max_batch_size_alone",
            ),
        },
    ),
    Pitfall(
        "config.pbtxt and auto-complete",
        "value and index of a class are taken for each other, and lines of the label file for others",
        {
            "their order, ties, lines that are empty or missing, counts above": (
                CONFIGURATIONS + "test_the_top_classes_have_their_labels_and_ties_go_by_index",
                CONFIGURATIONS + "test_the_top_classes_over_grpc",
            ),
            "counts below 1": (
                CONFIGURATIONS + "test_a_count_of_classes_that_is_none_is_refused",
                CONFIGURATIONS + "test_a_count_of_classes_below_one_is_refused_over_grpc",
            ),
            "each row of a batch": (CONFIGURATIONS + "test_each_row_of_a_batch_has_its_top_classes",),
            "of strings": (CONFIGURATIONS + "test_strings_cannot_be_classified",),
            "a file that is missing": (CONFIGURATIONS + "test_a_missing_label_file_is_an_error_of_the_load",),
        },
    ),
    Pitfall(
        "config.pbtxt and auto-complete",
        "a configuration in a load call that is almost right is taken for another, or ends what serves",
        {
            "every spelling that is none, by its path": (
                CONFIGURATIONS + "test_a_configuration_that_cannot_be_used_is_named_and_harms_nothing",
            ),
            "a map as key and value": (
                CONFIGURATIONS + "test_the_error_of_a_map_written_as_key_and_value_tells_how_it_is_written",
            ),
            "a version policy alone": (
                CONFIGURATIONS + "test_a_version_policy_alone_picks_the_version_and_the_rest_is_completed",
            ),
            "the model's directory, in text and in JSON": (
                "unit/test_config_text.py::test_text_and_json_of_the_same_configuration_give_the_same_message",
                "unit/test_config_text.py::test_the_name_of_the_model_directory_is_expanded_in_parameters",
            ),
        },
    ),
]

REPOSITORY = [
    Pitfall(
        "repository, load and unload",
        "a reload makes a hole in service",
        {
            "by poll and by call, with a version and without": (
                CHANGES + "test_a_rollout_makes_no_hole",
                CHANGES + "test_a_reload_by_call_makes_no_hole",
                ROLLOUT + "test_a_version_is_replaced_without_a_hole",
            ),
            "requests inside the old one": (ROLLOUT + "test_requests_inside_the_old_version_end_in_peace",),
            "two versions at once": (ROLLOUT + "test_a_version_is_added_beside_those_that_serve",),
            "one that is broken": (ROLLOUT + "test_a_broken_version_changes_nothing_and_its_reason_is_told",),
            "in every backend, while others die": (
                "chaos/test_backends_storm.py::test_nothing_else_is_lost_and_nothing_is_left_behind",
            ),
        },
    ),
    Pitfall(
        "repository, load and unload",
        "a file that is replaced by one with an older date is not noticed",
        {
            "an older date": (CHANGES + "test_a_file_that_is_replaced_by_one_of_an_older_date_is_served",),
            "the same size and date": (CHANGES + "test_bytes_that_change_under_the_same_size_and_date_are_served",),
            "a link that leads elsewhere": (CHANGES + "test_a_link_that_is_switched_is_followed",),
            "a touch": (CHANGES + "test_a_touched_file_goes_on_answering",),
        },
    ),
    Pitfall(
        "repository, load and unload",
        "every load and unload leaves memory, processes or files",
        {
            "cycles under a server": (
                ROLLOUT + "test_ten_loads_and_unloads_leave_the_server_as_it_was",
                "unit/registry/test_unload.py::test_a_hundred_loads_and_unloads_leave_nothing",
            ),
            "fifty and more, by hand": ("bench/soak.py",),
        },
    ),
    Pitfall(
        "repository, load and unload",
        "a module beside a Python model is read as it was",
        {
            "replaced, with the same size and date": (
                "conformance/test_python_backend.py::test_a_replaced_helper_is_read_anew_though_size_and_date_are_the_same",
            ),
        },
    ),
]

SCHEDULERS = [
    Pitfall(
        "schedulers",
        "the time of a request in the queue is looked at only when the model is free",
        {
            "while the model is busy": (BATCHING + "test_a_queue_timeout_fires_while_the_model_is_busy",),
            "the queue holds as many as it says": (
                BATCHING + "test_a_queue_of_two_holds_exactly_two_whatever_the_spacing",
            ),
            "both are counted": (STATISTICS + "test_requests_that_find_the_queue_full_are_counted_as_rejected",),
        },
    ),
    Pitfall(
        "schedulers",
        "an ensemble that is asked for fewer outputs fails, and not with its own error",
        {
            "each output alone, both, none named": (
                ENSEMBLES + "test_every_output_comes_where_none_is_named",
                ENSEMBLES + "test_a_branch_whose_output_nobody_asks_for_does_not_run",
            ),
            "fifty callers at once": (ENSEMBLES + "test_fifty_clients_get_what_each_asked_for",),
            "a step that fails": (ENSEMBLES + "test_a_failing_branch_is_named_with_its_own_error_and_code",),
            "a step that leaves its output out": (ENSEMBLES + "test_a_member_that_leaves_an_output_out_is_named",),
            "a step that dies, in every backend": (
                BACKEND_CHAOS
                + "test_an_ensemble_with_a_member_that_dies_fails_naming_it_and_the_next_request_is_served",
            ),
        },
    ),
    Pitfall(
        "schedulers",
        "the response cache answers one request with what another asked for",
        {
            "other outputs": (CACHE + "test_all_outputs_one_of_them_and_another_are_each_right",),
            "another shape of the same bytes": (CACHE + "test_the_same_bytes_in_another_shape_are_another_request",),
            "another datatype, name or version": (
                "unit/test_response_cache.py",
                CACHE + "test_a_new_version_and_a_reloaded_one_answer_for_themselves",
            ),
            "inputs in another order": (CACHE + "test_inputs_in_another_order_are_the_same_request",),
            "a decoupled model": (CACHE + "test_a_decoupled_model_whose_answers_should_be_kept_is_refused_at_load",),
            "an entry larger than the cache": (CACHE + "test_an_answer_larger_than_the_cache_is_given_and_not_kept",),
            "full": (CACHE + "test_random_inputs_fill_the_cache_and_slow_nothing_down",),
        },
    ),
]

PROCESSES = [
    Pitfall(
        "backend processes",
        "clients that give up take workers away for ever",
        {
            "fifty deadlines, then longer ones": (
                MODELS + "test_clients_that_give_up_leave_both_instances_to_those_that_wait",
                BATCHING + "test_clients_that_come_and_go_leave_the_model_as_it_was",
            ),
            "a model that does not end": (
                PYTHON + "test_a_model_that_loops_for_ever_is_ended_once_nobody_waits",
                BATCHING + "test_a_hanging_request_given_up_frees_its_instance",
            ),
            "a process that dies is replaced": (
                BACKEND_CHAOS + "test_what_runs_in_a_killed_process_fails_at_once_and_what_waits_is_served_by_the_next",
                BACKEND_CHAOS + "test_instances_in_processes_of_their_own_die_alone",
                BACKEND_CHAOS + "test_readiness_follows_the_process_of_a_model",
            ),
        },
    ),
    Pitfall(
        "backend processes",
        "shared memory is left behind, and grows",
        {
            "nothing with a name, whatever ends": (
                MODELS + "test_nothing_with_a_name_is_used_and_nothing_is_left_whatever_ends",
            ),
            "given back when idle": (
                "integration/test_scale.py::test_what_large_requests_took_is_given_back_when_they_are_over",
            ),
            "a process at its limit": (
                BACKEND_CHAOS + "test_a_process_at_its_limit_of_memory_fails_what_does_not_fit_and_serves_what_does",
                BACKEND_CHAOS + "test_a_model_that_gets_no_memory_fails_its_request_and_lives_on",
            ),
            "everything at once, for long": (
                "chaos/test_backends_storm.py::test_nothing_else_is_lost_and_nothing_is_left_behind",
                "chaos/soak_backends.py",
            ),
        },
    ),
]

COUNTERS = [
    Pitfall(
        "metrics, statistics, tracing",
        "the counters of an ensemble with branches are wrong",
        {
            "one step before nine": (ENSEMBLES + "test_the_counters_of_a_fan_of_nine_add_up",),
            "failures": (ENSEMBLES + "test_a_failure_is_counted_with_the_member_and_with_the_ensemble",),
            "counts without latencies": (
                "unit/test_metrics.py::test_latency_counters_can_be_switched_off_while_counts_go_on",
            ),
        },
    ),
]

PYTHON_MODELS = [
    Pitfall(
        "Python models",
        "many streamed calls out of a coroutine fail now and then, and one out of a thread never ends",
        {
            "fifty at once, again and again": (
                PYTHON_CALLS + "test_many_streamed_calls_at_once_out_of_a_coroutine_never_fail",
            ),
            "a thread of initialize": (PYTHON_CALLS + "test_a_thread_of_initialize_may_call",),
            "the sum of streamed responses": (
                "e2e/test_python_examples.py::test_the_responses_of_a_decoupled_model_add_up_to_the_square",
            ),
        },
    ),
    Pitfall(
        "Python models",
        "one bad request fails its whole batch",
        {
            "three answers, one error": (
                PYTHON + "test_requests_are_batched_and_each_gets_its_rows_and_its_error_alone",
                BATCHING + "test_a_request_that_fails_in_a_batch_fails_alone",
                ENSEMBLES + "test_one_bad_request_costs_no_other_of_its_batch_anything",
            ),
        },
    ),
]

MODEL_PITFALLS = [
    *UNLIKE_REQUESTS,
    *ENVIRONMENTS,
    *SEQUENCES,
    *CONFIGURATION,
    *REPOSITORY,
    *SCHEDULERS,
    *PROCESSES,
    *COUNTERS,
    *PYTHON_MODELS,
]
