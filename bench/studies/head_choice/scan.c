// Mamba-1's scan and its gradient in fp32, one row and channel after the other, for compiled_scan.py.
//
//   h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t],   y[t] = C[t] h[t]
//
// Layouts: x, dt, y and their gradients (R,I,T); A (I,N); B, C (R,T,N); the last state (R,I,N). R rows, T tokens, I inner
// width, N state width. Gradients of A, B and C are added to. decays (T,N) and states (T+1,N) are buffers.
#include <math.h>
#include <string.h>

void forward(const float *x, const float *dt, const float *A, const float *B, const float *C, float *y, float *last,
             long R, long I, long T, long N) {
  for (long r = 0; r < R; r++)
    for (long i = 0; i < I; i++) {
      float *h = last + (r * I + i) * N;
      const float *a = A + i * N;
      memset(h, 0, sizeof(float) * N);
      for (long t = 0; t < T; t++) {
        const float *b = B + (r * T + t) * N, *c = C + (r * T + t) * N;
        float d = dt[(r * I + i) * T + t], u = d * x[(r * I + i) * T + t], sum = 0;
        for (long n = 0; n < N; n++) {
          h[n] = expf(d * a[n]) * h[n] + u * b[n];
          sum += h[n] * c[n];
        }
        y[(r * I + i) * T + t] = sum;
      }
    }
}

// g holds the gradient of the last state, and is changed.
void backward(const float *x, const float *dt, const float *A, const float *B, const float *C, const float *dy, float *g,
              float *dx, float *ddt, float *dA, float *dB, float *dC, float *decays, float *states,
              long R, long I, long T, long N) {
  for (long r = 0; r < R; r++)
    for (long i = 0; i < I; i++, g += N) {
      const float *a = A + i * N;
      float *da = dA + i * N;
      memset(states, 0, sizeof(float) * N);
      for (long t = 0; t < T; t++) {
        const float *b = B + (r * T + t) * N, *before = states + t * N;
        float d = dt[(r * I + i) * T + t], u = d * x[(r * I + i) * T + t];
        float *e = decays + t * N, *h = states + (t + 1) * N;
        for (long n = 0; n < N; n++) {
          e[n] = expf(d * a[n]);
          h[n] = e[n] * before[n] + u * b[n];
        }
      }
      for (long t = T - 1; t >= 0; t--) {
        long k = (r * I + i) * T + t, m = (r * T + t) * N;
        const float *b = B + m, *c = C + m, *e = decays + t * N, *before = states + t * N, *h = states + (t + 1) * N;
        float *db = dB + m, *dc = dC + m, w = dy[k], d = dt[k], u = d * x[k], put = 0, by_decay = 0;
        for (long n = 0; n < N; n++) {
          float q = g[n] + w * c[n];  // the gradient of h[t]
          dc[n] += w * h[n];
          db[n] += u * q;
          put += q * b[n];
          g[n] = q *= e[n];
          q *= before[n];  // the gradient of dt A
          by_decay += q * a[n];
          da[n] += q * d;
        }
        dx[k] = put * d;
        ddt[k] = by_decay + put * x[k];
      }
    }
}
