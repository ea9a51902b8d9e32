"""Values of DeepSpeed's configuration, as they are read wherever ds_parity reads them."""

from ds_parity.values.coerced import of_model, real, switch, whole

__all__ = ["of_model", "real", "switch", "whole"]
