"""MultiAgent-OPD in JAX: a team of language-model agents trained by outcome and by distillation."""
