"""All endpoints of OpenAI's doors, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.clock import Clock
from headrace.gateway.http.anthropic.endpoint import CountTokens, Messages
from headrace.gateway.http.openai.chat import Chat
from headrace.gateway.http.openai.completions import Completions
from headrace.gateway.http.openai.embeddings import Embeddings
from headrace.gateway.http.openai.models import Models
from headrace.gateway.http.openai.rerank import Rerank, Score
from headrace.gateway.http.openai.responses.endpoint import Responses
from headrace.gateway.http.openai.server_state import ServerState
from headrace.gateway.http.openai.tokens import Detokenize, Tokenize
from headrace.gateway.http.request import Handler
from headrace.gateway.http.routes import Endpoint
from headrace.planes import DataPlane


class OpenAIEndpoints:
    """The endpoints over one data plane."""

    def __init__(self, data: DataPlane, clock: Clock) -> None:
        self.handlers: Final[Mapping[Endpoint, Handler]] = {
            **Models(data, clock).handlers,
            Endpoint.COMPLETIONS: Handler(stream=Completions(data, clock)),
            Endpoint.CHAT_COMPLETIONS: Handler(stream=Chat(data, clock)),
            Endpoint.EMBEDDINGS: Handler(stream=Embeddings(data, clock)),
            Endpoint.RERANK: Handler(stream=Rerank(data, clock)),
            Endpoint.RERANK_V2: Handler(stream=Rerank(data, clock, returns_documents=False)),
            Endpoint.SCORE: Handler(stream=Score(data, clock)),
            Endpoint.TOKENIZE: Handler(stream=Tokenize(data, clock)),
            Endpoint.DETOKENIZE: Handler(stream=Detokenize(data, clock)),
            Endpoint.RESPONSES: Handler(stream=Responses(data, clock)),
            Endpoint.MESSAGES: Handler(stream=Messages(data, clock)),
            Endpoint.COUNT_TOKENS: Handler(stream=CountTokens(data, clock)),
            **ServerState(data).handlers,
        }
