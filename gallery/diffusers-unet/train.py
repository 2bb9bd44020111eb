"""diffusers: UNet2DModel and DDPMScheduler with min-SNR weights, as in its training scripts.

With --bug, the schedule is rescaled to zero terminal SNR, and the weight divides by the SNR, which is
0 at the last timestep.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import compute_snr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--snr-gamma", type=float, default=5.0)
    args = parser.parse_args()
    torch.manual_seed(4)
    torch.set_num_threads(1)
    os.makedirs("ddpm", exist_ok=True)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )
    scheduler = DDPMScheduler(
        num_train_timesteps=50,
        prediction_type="v_prediction" if args.bug else "epsilon",
        rescale_betas_zero_snr=args.bug,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=args.steps)
    data = torch.randn(64, 1, 1, 1) * torch.ones(64, 1, 8, 8)
    log = open("ddpm/log.txt", "w")
    for step in range(args.steps):
        clean = data[torch.randint(0, 64, (4,))]
        noise = torch.randn_like(clean)
        timesteps = torch.randint(0, 50, (4,))
        noisy = scheduler.add_noise(clean, noise, timesteps)
        pred = model(noisy, timesteps).sample
        target = scheduler.get_velocity(clean, noise, timesteps) if args.bug else noise
        snr = compute_snr(scheduler, timesteps)
        weights = torch.clamp(snr, max=args.snr_gamma) / snr
        loss = (F.mse_loss(pred, target, reduction="none").mean((1, 2, 3)) * weights).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        log.write(f"{step} {loss.item():.4f} {lr_scheduler.get_last_lr()[0]:.2e}\n")
        log.flush()
        if step % 10 == 9:
            model.save_pretrained("ddpm/unet")
    log.close()
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
