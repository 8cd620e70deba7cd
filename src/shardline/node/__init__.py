"""The Node: one Shard, its Hot KV State, and the steps that pass through."""
