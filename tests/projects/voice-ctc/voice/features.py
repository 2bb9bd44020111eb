import numpy as np

WIN, HOP, BANDS = 128, 64, 24


def filterbank(rate, n_fft=WIN, bands=BANDS):
    top = 2595 * np.log10(1 + rate / 2 / 700)
    hz = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    freqs = np.linspace(0, rate / 2, n_fft // 2 + 1)
    bank = np.zeros((bands, len(freqs)))
    for b in range(bands):
        lo, mid, hi = hz[b], hz[b + 1], hz[b + 2]
        bank[b] = np.maximum(0, np.minimum((freqs - lo) / (mid - lo), (hi - freqs) / (hi - mid)))
    bank[bank.sum(1) == 0] += 1.0 / len(freqs)
    return bank


def log_mel(samples, bank):
    wave = samples.astype(np.float32) / 32768.0
    n = 1 + max(0, len(wave) - WIN) // HOP
    frames = np.stack([wave[i * HOP:i * HOP + WIN] for i in range(n)]) * np.hanning(WIN)
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    return np.log(power @ bank.T)


def normalise(feats):
    """Per-utterance mean and variance normalisation."""
    mean, std = feats.mean(axis=0), feats.std(axis=0)
    return ((feats - mean) / (std + 1e-5)).astype(np.float32)
