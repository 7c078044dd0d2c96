"""JetStream in Spark: `format("jetstream")` for batch and streaming, reading and writing."""
