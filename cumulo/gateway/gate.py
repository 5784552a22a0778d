"""GatewayGate: who may ask what. Clients' keys are checked here where the gateway has a file of them."""

import hmac

from starlette.datastructures import Headers
from starlette.types import Scope

from cumulo.gateway.options import GatewayOptions
from cumulo.serve.access.keys import ApiKeys, Caller, no_entry, shown_key
from cumulo.serve.access.limits import RateLimits
from cumulo.serve.errors import ApiError
from cumulo.serve.fleet.wire import FleetCaller


class GatewayGate:
    def __init__(self, options: GatewayOptions) -> None:
        anyone = self.anyone = Caller("anyone", options.requests_per_minute, options.tokens_per_minute)
        self.keys = ApiKeys(options.api_keys, anyone) if options.api_keys is not None else None
        self.limits = RateLimits()
        self._operator_key = options.operator_key or options.fleet_key

    def caller(self, scope: Scope) -> Caller:
        """Raises ApiError 401 or 429. Charges a request."""
        caller: Caller | None = self.anyone
        if self.keys is not None:
            caller = self.keys.caller_of(shown_key(Headers(scope=scope)))
            if caller is None:
                raise no_entry("this API key is not valid here")
        assert caller is not None
        if scope["method"] == "POST":
            self.limits.charge_request(caller)
        return caller

    def fleet_caller(self, caller: Caller) -> FleetCaller | None:
        """For the replicas, which then ask for no key. Limits are kept here, for all replicas together."""
        if self.keys is None:
            return None
        return FleetCaller(
            caller.name,
            may_go_first=caller.may_go_first,
            may_see_names=caller.may_see_names,
            cache_scope=caller.cache_scope,
        )

    def check_operator(self, scope: Scope) -> None:
        """Who changes the fleet shows the operator's key; raises ApiError."""
        if self._operator_key is None:
            raise ApiError(
                403,
                "replicas are added, drained and removed with the operator's key, and this gateway has none: start "
                "it with --operator-key-file or --fleet-key-file",
                code="no_operator_key",
            )
        if not hmac.compare_digest(shown_key(Headers(scope=scope)).encode(), self._operator_key.encode()):
            raise no_entry("this is not the operator's key; without one of its own it is the fleet's key")
