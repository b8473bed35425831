"""What servers of language models got wrong, and with OpenAI's API."""

from __future__ import annotations

from conformance.pitfall import Pitfall

DOORS = "conformance/test_language_pitfalls.py::"
STREAMS = "unit/openai/test_openai_streams.py::"
CHATS = "unit/openai/test_openai_chat.py::"
COMPLETIONS = "unit/openai/test_openai_completions.py::"
REFUSALS = "unit/openai/test_openai_refusals.py::"
GRAMMARS = "unit/llm/test_grammar_llguidance.py::"
COMPILER = "unit/llm/test_grammar_compiler.py::"
LANGUAGE = "language models and OpenAI's API"

LANGUAGE_PITFALLS = [
    Pitfall(
        LANGUAGE,
        "deltas are empty, or null, while text is held back",
        {
            "a stop string of ten characters whose first ones occur in the text": (
                DOORS + "test_only_what_may_begin_a_stop_string_is_held_back_and_no_delta_is_empty",
            ),
            "a token that completes no character": (
                CHATS + "test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason",
                COMPLETIONS + "test_a_stream_has_text_in_every_chunk_and_the_reason_in_the_last",
            ),
        },
    ),
    Pitfall(
        LANGUAGE,
        "max_tokens of 0, 1, null, absent, negative or huge ends the engine, or is taken for another",
        {
            "0 with echo and log probabilities": (
                DOORS + "test_echo_without_a_token_gives_the_prompt_and_its_log_probabilities",
                COMPLETIONS + "test_the_prompt_alone_comes_back_where_no_token_is_wanted",
            ),
            "of chats, in both members": (
                DOORS + "test_how_many_tokens_a_chat_gets",
                DOORS + "test_of_both_limits_the_newer_one_holds",
            ),
            "of completions": (COMPLETIONS + "test_how_many_tokens_a_completion_may_have",),
        },
    ),
    Pitfall(
        LANGUAGE,
        "an empty prompt ends the service for everybody",
        {
            "as text, tokens, and one of several": (DOORS + "test_an_empty_prompt_is_refused_by_its_place",),
            "no messages": (DOORS + "test_a_conversation_without_messages_is_refused",),
            "a message without text": (DOORS + "test_a_message_without_text_is_fine",),
        },
    ),
    Pitfall(
        LANGUAGE,
        "a schema or pattern that cannot be compiled, or not soon, ends or delays the service",
        {
            "of the wrong kind or too long": (
                REFUSALS + "test_what_both_doors_refuse",
                CHATS + "test_what_the_text_has_to_be_reaches_the_model",
            ),
            "what is no schema, pattern or grammar": (
                GRAMMARS + "test_what_cannot_be_a_grammar_is_refused_by_name_and_soon",
            ),
            "what costs much": (
                GRAMMARS + "test_a_costly_grammar_ends_in_an_error_of_its_own_before_it_costs_much",
                COMPILER + "test_one_that_takes_too_long_is_refused_and_others_go_on",
            ),
            "others are not delayed": (COMPILER + "test_who_asks_does_not_wait_and_quick_ones_pass_a_slow_one",),
            "two hundred at once": (
                COMPILER + "test_two_hundred_descriptions_leave_no_more_than_are_kept",
                COMPILER + "test_what_is_kept_is_bounded_in_bytes_too",
            ),
            "numbers and blanks that could go on for ever": (
                GRAMMARS + "test_blanks_and_digits_go_on_for_so_long_only",
            ),
        },
    ),
    Pitfall(
        LANGUAGE,
        "the usage of a stream is missing, or comes unasked",
        {
            "asked and not asked, one choice and two": (
                DOORS + "test_usage_comes_once_at_the_end_for_those_who_asked",
                CHATS + "test_usage_comes_in_one_more_chunk_where_it_was_asked_for",
            ),
            "its options without a stream": (DOORS + "test_options_of_a_stream_without_a_stream_are_refused",),
        },
    ),
    Pitfall(
        LANGUAGE,
        "log probabilities are lost, shifted, or no JSON",
        {
            "0 and 5, with echo, streamed and not": (
                DOORS + "test_log_probabilities_of_a_completion_are_complete_and_in_place",
                COMPLETIONS + "test_no_likely_token_beside_the_chosen_one_is_not_no_log_probability",
            ),
            "offsets count from the start of the whole text": (
                COMPLETIONS + "test_offsets_of_tokens_count_from_the_start_of_the_whole_text",
            ),
            "top_logprobs of 0, 20, 21, and alone": (DOORS + "test_how_many_likely_tokens_a_chat_may_be_told",),
            "while text is held back": (
                DOORS + "test_no_log_probability_is_lost_while_text_is_held_back",
                CHATS + "test_log_probabilities_have_an_entry_for_each_token_also_while_text_is_held_back",
            ),
            "minus infinity": (
                CHATS + "test_log_probabilities_have_an_entry_for_each_token_also_while_text_is_held_back",
                COMPLETIONS + "test_offsets_of_tokens_count_from_the_start_of_the_whole_text",
            ),
        },
    ),
    Pitfall(
        LANGUAGE,
        "a failure looks like an answer without words, or leaves the stream open",
        {
            "before the first token, after it, and the process gone": (
                DOORS + "test_a_failure_before_the_first_token_is_a_status",
                DOORS + "test_a_failure_after_three_tokens_is_an_event_and_the_end",
                REFUSALS + "test_a_failure_before_the_first_token_has_its_status",
                STREAMS + "test_a_failure_after_the_first_token_is_an_event_and_ends_the_stream",
            ),
            "an end without an answer": (STREAMS + "test_an_end_without_an_answer_is_never_an_empty_success",),
            "an end in the middle of a choice": (
                STREAMS + "test_a_stream_whose_choice_has_no_end_is_told_to_have_failed",
            ),
            "no choices, streamed": (DOORS + "test_no_choices_are_refused_with_a_status_also_where_they_are_streamed",),
            "generate_stream": (DOORS + "test_generate_stream_tells_of_a_failure_too_and_ends",),
        },
    ),
    Pitfall(
        LANGUAGE,
        "one request is the work of a thousand",
        {
            "prompts, choices, stop strings, log probabilities": (
                DOORS + "test_what_would_be_very_much_work_is_refused_before_it_waits",
                REFUSALS + "test_what_completions_refuse",
            ),
            "thousands of headers, and a very long one": (DOORS + "test_headers_without_number_or_end_are_refused",),
            "JSON that is nested deeply": (REFUSALS + "test_a_body_that_is_no_request",),
        },
    ),
]
