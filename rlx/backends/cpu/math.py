"""stub"""
from rlx.backends.cpu.emit import Emitter, V, vector
def bf16_bits(e,x):
    ib=e.convert('bitcast',x,'i32'); c=lambda v:e.const(ib.ty,v)
    r=e.bin('add',ib,e.bin('add',e.bin('and',e.bin('lshr',ib,c(16)),c(1)),c(0x7fff)))
    q=e.bin('or',ib,c(0x400000))
    return e.convert('trunc',e.bin('lshr',e.select(e.cmp('uno',x,x),q,r),c(16)),'i16')
def _i(n): return lambda e,*a: e.intrinsic(n,*a)
exp,log,sin,cos,tanh,pow=map(_i,['exp','log','sin','cos','tanh','pow'])
def erf(e,x): return x
def fmod(e,a,b): return e.bin('frem',a,b)
