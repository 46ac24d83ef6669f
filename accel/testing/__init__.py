"""What plugin authors and our own tests share: seeded tiny models and the conformance suite."""
