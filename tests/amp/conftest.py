from as_before import torch_as_before as torch_as_before
