"""How failures look over HTTP."""

from __future__ import annotations

import json

from headrace.gateway.http.errors import error_body


def test_a_sentence_is_kept_as_it_is():
    assert json.loads(error_body("é" * 8000)) == {"error": "é" * 8000}


def test_a_very_long_sentence_is_cut():
    assert json.loads(error_body("é" * 8001)) == {"error": "é" * 8000 + "..."}
