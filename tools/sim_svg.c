/* tools/sim_svg.c: hit rates over cache size as an SVG that needs nothing else. */
#include <math.h>
#include <string.h>

#include "tools/sim.h"

#define WIDTH 760
#define HEIGHT 460
#define LEFT 70
#define RIGHT 150 /* the names of the lines */
#define TOP 50
#define BOTTOM 60

static const char *const color[] = { "#1f77b4", "#d62728", "#2ca02c", "#444444", "#9467bd", "#ff7f0e", "#17becf", "#8c564b" };
static const char *const dash[] = { "", "", "6 3", "2 3" };
#define N_COLORS (sizeof(color) / sizeof(color[0]))

static void text_escaped(FILE *f, const char *s)
{
    for (; *s; s++)
        switch (*s) {
        case '<': fputs("&lt;", f); break;
        case '>': fputs("&gt;", f); break;
        case '&': fputs("&amp;", f); break;
        case '"': fputs("&quot;", f); break;
        default: fputc((unsigned char)*s < 32 ? ' ' : *s, f); /* no control characters in XML */
        }
}

static void text(FILE *f, double x, double y, const char *more, const char *s)
{
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, more);
    text_escaped(f, s);
    fputs("</text>\n", f);
}

static double x_at(const struct k3_plot *p, double x)
{
    double lo = log(p->x[0]), hi = log(p->x[p->n_x - 1]);

    return LEFT + (hi > lo ? (log(x) - lo) / (hi - lo) : 0.5) * (WIDTH - LEFT - RIGHT);
}

static double y_at(double y, double top)
{
    return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM);
}

/* 1, 2, 5, 10, 20, ... within the axis; when that gives fewer than two, the ends. */
static void x_axis(FILE *f, const struct k3_plot *p)
{
    double lo = p->x[0], hi = p->x[p->n_x - 1];
    static const double step[] = { 1, 2, 5 };
    int n = 0;
    char label[32];

    for (int pass = 0; pass < 2; pass++)
        for (int e = -9; e <= 12; e++)
            for (int i = 0; i < 3; i++) {
                double x = step[i] * pow(10, e);

                if (x < lo * 0.999 || x > hi * 1.001)
                    continue;
                if (pass == 0) {
                    n++;
                    continue;
                }
                if (n > 14 && i) /* too many: powers of ten only */
                    continue;
                snprintf(label, sizeof(label), "%g", x);
                fprintf(f, "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"#ddd\"/>\n", x_at(p, x), TOP,
                        x_at(p, x), HEIGHT - BOTTOM);
                text(f, x_at(p, x), HEIGHT - BOTTOM + 18, "text-anchor=\"middle\"", label);
            }
    if (n < 2)
        for (int end = 0; end < (hi > lo ? 2 : 1); end++) {
            snprintf(label, sizeof(label), "%.3g", end ? hi : lo);
            text(f, x_at(p, end ? hi : lo), HEIGHT - BOTTOM + 32, "text-anchor=\"middle\"", label);
        }
}

static double y_top(const struct k3_plot *p)
{
    double most = 0;

    for (size_t i = 0; i < p->n_lines * p->n_x; i++)
        most = p->y[i] > most ? p->y[i] : most;
    return most > 50 ? 100 : most > 20 ? 50 : most > 10 ? 20 : 10;
}

void k3_plot_write(FILE *f, const struct k3_plot *p)
{
    double top = y_top(p);
    char more[160], label[32];

    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n", WIDTH, HEIGHT,
            WIDTH, HEIGHT, WIDTH, HEIGHT);
    text(f, LEFT, 28, "font-size=\"14\"", p->title);
    for (int i = 0; i <= 5; i++) {
        double y = top * i / 5;

        fprintf(f, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", LEFT, y_at(y, top),
                WIDTH - RIGHT, y_at(y, top));
        snprintf(label, sizeof(label), "%g", y);
        text(f, LEFT - 8, y_at(y, top) + 4, "text-anchor=\"end\"", label);
    }
    x_axis(f, p);
    fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#888\"/>\n", LEFT, TOP,
            WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    text(f, LEFT + (WIDTH - LEFT - RIGHT) / 2.0, HEIGHT - 14, "text-anchor=\"middle\"", p->x_label);
    snprintf(more, sizeof(more), "text-anchor=\"middle\" transform=\"rotate(-90 20 %d)\"", TOP + (HEIGHT - TOP - BOTTOM) / 2);
    text(f, 20, TOP + (HEIGHT - TOP - BOTTOM) / 2.0, more, p->y_label);
    for (size_t l = 0; l < p->n_lines; l++) {
        const char *c = color[l % N_COLORS];

        fprintf(f, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\" points=\"", c,
                dash[l % (sizeof(dash) / sizeof(dash[0]))]);
        for (size_t i = 0; i < p->n_x; i++)
            fprintf(f, "%s%.1f,%.1f", i ? " " : "", x_at(p, p->x[i]), y_at(p->y[l * p->n_x + i], top));
        fputs("\"/>\n", f);
        for (size_t i = 0; i < p->n_x; i++)
            fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\" fill=\"%s\"/>\n", x_at(p, p->x[i]),
                    y_at(p->y[l * p->n_x + i], top), c);
        fprintf(f, "<line x1=\"%d\" y1=\"%zu\" x2=\"%d\" y2=\"%zu\" stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\"/>\n",
                WIDTH - RIGHT + 12, TOP + 12 + 20 * l, WIDTH - RIGHT + 36, TOP + 12 + 20 * l, c,
                dash[l % (sizeof(dash) / sizeof(dash[0]))]);
        text(f, WIDTH - RIGHT + 42, (double)(TOP + 16 + 20 * l), "", p->name[l]);
    }
    fputs("</svg>\n", f);
}
