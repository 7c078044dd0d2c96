"""What operators see: structured logs, metrics behind a small seam, and the health endpoints."""
