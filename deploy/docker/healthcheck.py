"""Says by its exit status whether the server of this container is live. Asks the door that HEADRACE_HTTP_PORT names."""

import http.client
import os
import sys

connection = http.client.HTTPConnection("127.0.0.1", int(os.environ.get("HEADRACE_HTTP_PORT", "8000")), timeout=2)
try:
    connection.request("GET", "/v2/health/live")
    sys.exit(connection.getresponse().status != http.HTTPStatus.OK)
except OSError as error:
    sys.exit(f"not live: {error}")
