"""The client behind `headrace infer`: one request to any KServe v2 server, over HTTP or gRPC."""
