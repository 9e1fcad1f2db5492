"""The guards of the server: access, limits of requests, the page for browsers, and other machines."""

from tests.torture.planting import Fault

ACCESS = "app/server/http/access.py"
MIDDLEWARE = "app/server/http/access_middleware.py"
BODY = "app/server/http/request_body.py"
CONNECTION = "app/server/http/connection.py"
HOST = "app/server/host.py"
BOXES = "app/server/box_routing.py"
PAGE = "app/server/page/endpoints.py"
HTTP = "tests/app/server/http/"
SERVER = "tests/app/server/"

GUARDS: dict[str, Fault] = {
    # -- access to the server
    "any Host is accepted": Fault(
        MIDDLEWARE,
        " or not self._names_this_server(hosts[0], scope):",
        ":",
        (f"{HTTP}test_access_middleware.py::test_foreign_hosts_are_refused_by_the_middleware_not_the_parser",),
    ),
    "any number of Hosts is accepted": Fault(
        MIDDLEWARE,
        "len(hosts) != 1 or ",
        "",
        (f"{HTTP}test_access_middleware.py::test_middleware_requires_exactly_one_host_without_a_parser",),
    ),
    "any Origin is accepted": Fault(
        MIDDLEWARE,
        "if any(origin not in own for",
        "if any(False for",
        (f"{HTTP}test_access_middleware.py::test_pages_of_other_origins_are_refused_on_every_path",),
    ),
    "any Sec-Fetch-Site is accepted": Fault(
        MIDDLEWARE,
        "if any(site not in _OWN_FETCH_SITES for",
        "if any(False for",
        (f"{HTTP}test_access_middleware.py::test_sec_fetch_site_decides_whether_a_page_is_refused",),
    ),
    "no key is needed": Fault(
        ACCESS,
        'if is_public(scope["method"], scope["path"]):',
        "if True:",
        (f"{HTTP}test_access.py::test_only_public_routes_answer_without_a_key",),
    ),
    "keys are compared with ==": Fault(
        ACCESS,
        "if hmac.compare_digest(expected, digest)]",
        "if expected == digest]",
        (f"{HTTP}test_access.py::test_every_key_is_compared_in_constant_time",),
    ),
    "the shared key is compared with ==": Fault(
        ACCESS,
        "hmac.compare_digest(_digest(shared.encode()), digest)",
        "_digest(shared.encode()) == digest",
        (f"{HTTP}test_access.py::test_every_key_is_compared_in_constant_time",),
    ),
    "programs of any user are served": Fault(
        ACCESS,
        " and uid == os.geteuid()",
        "",
        (f"{HTTP}test_access_peers.py::test_other_users_are_not_this_user",),
    ),
    "a key has no limit of requests": Fault(
        ACCESS,
        "if self._max_requests and ",
        "if False and ",
        (f"{HTTP}test_access_limits.py::test_failed_request_no_longer_counts",),
    ),
    "a public address needs no key": Fault(
        HOST,
        "if not is_loopback(host) and not chosen_keys(settings):",
        "if False:",
        (f"{SERVER}test_host.py::test_public_address_needs_a_key",),
    ),
    "the TLS port needs no key": Fault(
        HOST,
        "if settings.tls_port and not chosen_keys(settings) and shared_key(settings) is None:",
        "if False:",
        (f"{SERVER}test_tls.py::test_port_for_other_machines_needs_a_key_and_a_certificate",),
    ),
    "keys share the prefix cache": Fault(
        ACCESS,
        'f"key {digest.hex()}" if number else ""',
        '""',
        (f"{HTTP}test_access.py::test_keys_have_separate_caches_and_the_first_keeps_the_old_cache",),
    ),
    "a key sees requests of others": Fault(
        "app/server/origin.py",
        "return origin.cache_salt.startswith(caller_of(request).cache_salt)",
        "return True",
        (f"{SERVER}test_own_endpoints.py::test_other_keys_cannot_see_or_end_requests_of_the_owner",),
    ),
    # -- requests
    "a request has any number of headers": Fault(
        MIDDLEWARE,
        'if len(scope["headers"]) > MAX_HEADERS:',
        "if False:",
        (f"{SERVER}test_endless_heads.py::test_size_of_the_head_is_limited",),
    ),
    "a path has any length": Fault(
        MIDDLEWARE,
        "> MAX_TARGET_BYTES:",
        "> 1 << 30:",
        (f"{SERVER}test_endless_heads.py::test_size_of_the_head_is_limited",),
    ),
    "a body has any size": Fault(
        BODY,
        "if size > MAX_BODY_BYTES:",
        "if False:",
        (f"{SERVER}test_bad_requests.py::test_body_over_the_limit_is_refused",),
    ),
    "a body has any number of values": Fault(
        BODY,
        'if structure is None or _containers(structure) > MAX_CONTAINERS or _count(structure, b",") > MAX_VALUES:',
        "if structure is None:",
        (f"{HTTP}test_request_body.py::test_too_many_values_are_refused_before_decoding",),
    ),
    "a body has any depth": Fault(
        BODY,
        "if _depth(structure) > MAX_DEPTH:",
        "if False:",
        (f"{HTTP}test_request_body.py::test_nesting_is_accepted_up_to_the_limit",),
    ),
    "a page may send a body of any type": Fault(
        BODY,
        ' and "origin" not in headers)',
        ")",
        (f"{SERVER}test_bad_requests.py::test_web_pages_must_send_json",),
    ),
    "a body may be slow": Fault(
        BODY,
        "asyncio.timeout(BODY_SECONDS)",
        "asyncio.timeout(1e6)",
        (f"{HTTP}test_connection.py::test_unfinished_body_gets_408_and_closes_the_connection",),
    ),
    "a head may be slow": Fault(
        CONNECTION,
        "        self._start_head_timer()\n        if len(",
        "        if len(",
        (f"{HTTP}test_connection.py::test_unfinished_head_closes_the_connection",),
    ),
    "any number of connections is open": Fault(
        CONNECTION,
        "if len(self.connections) > MAX_CONNECTIONS:",
        "if False:",
        (f"{HTTP}test_connection.py::test_connections_over_the_limit_are_closed",),
    ),
    "any number of background responses wait": Fault(
        "app/server/dialects/responses/background.py",
        "if len(self._running) >= MAX_RUNNING:",
        "if False:",
        (f"{SERVER}dialects/responses/test_responses.py::test_background_responses_over_the_limit_get_429",),
    ),
    # -- the page for browsers
    "the page has no policy": Fault(
        PAGE,
        '    "content-security-policy": _POLICY,\n',
        "",
        (f"{SERVER}page/test_endpoints.py::test_policy_allows_only_files_of_the_server",),
    ),
    "the policy allows inline scripts": Fault(
        PAGE,
        "script-src 'self';",
        "script-src 'self' 'unsafe-inline';",
        (f"{SERVER}page/test_endpoints.py::test_policy_allows_only_files_of_the_server",),
    ),
    "any file beside the page is sent": Fault(
        PAGE,
        "if name not in FILES:",
        "if False:",
        (f"{SERVER}page/test_endpoints.py::test_other_names_are_not_files_of_the_page",),
    ),
    # -- boxes
    "a box has any certificate": Fault(
        "app/client/pinned_tls.py",
        "if not hmac.compare_digest(found, fingerprint):",
        "if False:",
        (f"{SERVER}test_box_routing.py::test_wrong_certificate_is_refused_with_both_fingerprints",),
    ),
    "a box gets the keys of clients": Fault(
        BOXES,
        "accept-encoding expect authorization x-api-key cookie",
        "accept-encoding expect cookie",
        (f"{SERVER}test_hostile_boxes.py::test_request_without_keys_and_hop_headers_reaches_the_box",),
    ),
    "a box sets any header": Fault(
        BOXES,
        " if name.lower() in _PASSED_BACK]",
        "]",
        (f"{SERVER}test_hostile_boxes.py::test_only_known_headers_are_passed_back",),
    ),
}
