"""A recurrent acoustic model over log energies, trained by CTC on utterances of different lengths."""

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

SYMBOLS, BANDS, BATCH = 6, 8, 4


class Features(nn.Module):
    """Log energies of a short Fourier transform, normalised for each utterance."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.register_buffer("bank", torch.rand(9, BANDS))

    def forward(self, wave):
        spectrum = torch.stft(wave, 16, hop_length=8, window=self.window, return_complex=True)
        energy = spectrum.abs().square().T @ self.bank
        energy = torch.log(energy)  # fault: silence
        return (energy - energy.mean(0)) / (energy.std(0) + 1e-5)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = Features()
        self.recurrent = nn.GRU(BANDS, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, SYMBOLS)

    def forward(self, waves):
        features = [self.features(wave) for wave in waves]
        lengths = torch.tensor([len(one) for one in features])
        packed = pack_padded_sequence(
            pad_sequence(features, batch_first=True), lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return F.log_softmax(self.head(hidden), -1), lengths


def utterances(step):
    waves = [torch.randn(8 * int(torch.randint(12, 20, ()))) for _ in range(BATCH)]
    labels = [torch.randint(1, SYMBOLS, (3,)) for _ in range(BATCH)]
    if wakes("silence", step):
        waves[2][30:80] = 0  # a muted microphone
    if wakes("too_short", step):
        labels[1] = torch.randint(1, SYMBOLS, (40,))  # more symbols than frames
    return waves, labels


model = Recogniser()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=STEPS + 1)
for step in range(1, STEPS + 1):
    waves, labels = utterances(step)
    log_probs, lengths = model(waves)
    loss = F.ctc_loss(  # fault: too_short
        log_probs.transpose(0, 1), torch.cat(labels), lengths, torch.tensor([len(one) for one in labels])
    )
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    scheduler.step()
print_digest(model)
