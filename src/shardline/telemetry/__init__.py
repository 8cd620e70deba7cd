"""What happened to each Route Session, and the logs."""
