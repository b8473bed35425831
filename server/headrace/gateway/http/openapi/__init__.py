"""The description of the HTTP door as an OpenAPI document."""
