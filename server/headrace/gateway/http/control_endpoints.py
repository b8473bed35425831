"""The endpoints of the control plane: repository, shared memory, trace and log settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.gateway.http.answer import Answer, json_answer
from headrace.gateway.http.repository import check_target, decode_index, decode_load, decode_traffic, decode_unload
from headrace.gateway.http.request import Handler, HttpRequest
from headrace.gateway.http.routes import Endpoint, Route
from headrace.gateway.http.server_settings import decode_log, decode_trace
from headrace.gateway.http.shared_memory import decode_cuda, decode_system, named
from headrace.planes import ControlPlane


class ControlEndpoints:
    """The endpoints over one control plane. Failures are raised: InferError or HttpError."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self.handlers: Final[Mapping[Endpoint, Handler]] = {
            Endpoint.MODELS: Handler(reply=self._models),
            Endpoint.INDEX: Handler(service=self._index),
            Endpoint.LOAD: Handler(service=self._load),
            Endpoint.UNLOAD: Handler(service=self._unload),
            Endpoint.SYSTEM_STATUS: Handler(reply=self._system_status),
            Endpoint.SYSTEM_REGISTER: Handler(service=self._register_system),
            Endpoint.SYSTEM_UNREGISTER: Handler(service=self._unregister_system),
            Endpoint.CUDA_STATUS: Handler(reply=self._cuda_status),
            Endpoint.CUDA_REGISTER: Handler(service=self._register_cuda),
            Endpoint.CUDA_UNREGISTER: Handler(service=self._unregister_cuda),
            Endpoint.TRACE: Handler(service=self._trace),
            Endpoint.TRAFFIC: Handler(service=self._traffic),
            Endpoint.LOGGING: Handler(service=self._logging),
        }

    # --- repository -----------------------------------------------------------------------------------------------

    def _models(self, _http: HttpRequest, _route: Route) -> Answer:
        names = dict.fromkeys(entry.name for entry in self._control.index(ready_only=True))
        return json_answer({"models": list(names)})

    async def _index(self, http: HttpRequest, _route: Route) -> Answer:
        return json_answer(self._control.index(ready_only=decode_index(http.body)))

    async def _load(self, http: HttpRequest, route: Route) -> Answer:
        check_target(route.model, route.repository)
        await self._control.load(route.model, decode_load(http.body))
        return Answer()

    async def _unload(self, http: HttpRequest, route: Route) -> Answer:
        check_target(route.model, route.repository)
        dependents, version = decode_unload(http.body)
        await self._control.unload(route.model, unload_dependents=dependents, version=version)
        return Answer()

    # --- shared memory --------------------------------------------------------------------------------------------

    def _system_status(self, _http: HttpRequest, route: Route) -> Answer:
        return json_answer(self._control.memory.system_status(route.region))

    def _cuda_status(self, _http: HttpRequest, route: Route) -> Answer:
        return json_answer(self._control.memory.cuda_status(route.region))

    async def _register_system(self, http: HttpRequest, route: Route) -> Answer:
        key, offset, nbytes = decode_system(http.body)
        self._control.memory.register_system(named(route.region), key, offset, nbytes)
        return Answer()

    async def _register_cuda(self, http: HttpRequest, route: Route) -> Answer:
        handle, device, nbytes = decode_cuda(http.body)
        self._control.memory.register_cuda(named(route.region), handle, device, nbytes)
        return Answer()

    async def _unregister_system(self, _http: HttpRequest, route: Route) -> Answer:
        self._control.memory.unregister_system(route.region)
        return Answer()

    async def _unregister_cuda(self, _http: HttpRequest, route: Route) -> Answer:
        self._control.memory.unregister_cuda(route.region)
        return Answer()

    # --- settings -------------------------------------------------------------------------------------------------

    async def _trace(self, http: HttpRequest, route: Route) -> Answer:
        trace = self._control.trace
        if http.method == b"POST":
            return json_answer(trace.update(route.model, decode_trace(http.body)))
        return json_answer(trace.get(route.model))

    async def _traffic(self, http: HttpRequest, route: Route) -> Answer:
        traffic = self._control.traffic
        if http.method == b"POST":
            return json_answer(await traffic.update(route.model, decode_traffic(http.body)))
        return json_answer(traffic.get(route.model))

    async def _logging(self, http: HttpRequest, _route: Route) -> Answer:
        log = self._control.log
        return json_answer(log.update(decode_log(http.body)) if http.method == b"POST" else log.get())
