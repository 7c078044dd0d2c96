"""The import name under which Spark finds `format("jetstream")` by itself."""
