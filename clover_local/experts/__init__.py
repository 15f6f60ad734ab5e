"""The one place that knows where the routed experts are."""
