"""Values of JSON and of DeepSpeed's configuration, as they are read wherever ds_parity reads them."""

from ds_parity.values.coerced import of_model, real, switch, whole
from ds_parity.values.repeated import Repeated, object_of, repeated

__all__ = ["Repeated", "object_of", "of_model", "real", "repeated", "switch", "whole"]
