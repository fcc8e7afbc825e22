"""How good it is: functions of (logits, labels) and of (model, loader)."""
